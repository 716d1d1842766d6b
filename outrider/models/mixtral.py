"""Mixtral: Mistral's attention, with experts instead of the MLP in every layer."""

from __future__ import annotations

from outrider.layers import Experts, FeedForward, LayerNames, MoE, Router
from outrider.models.llama import Mistral
from outrider.models.qwen3_moe import read_rule

EXPERT_NAMES = ("w1", "w3", "w2")  # gate, up and down in the checkpoint
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")  # in transformers, of each expert
SPARSE = "block_sparse_moe"  # experts and their router in the checkpoint


def published_name(name: str) -> str:
    """Return the name that a tensor has in the checkpoint. name: its name in transformers' model class."""
    name = name.replace(".mlp.", f".{SPARSE}.")
    if f".{SPARSE}.experts." in name:
        for own, published in zip(PROJECTIONS, EXPERT_NAMES, strict=True):
            name = name.replace(f".{own}.weight", f".{published}.weight")
    return name


class Mixtral(Mistral):
    """Model class for MixtralForCausalLM."""

    default_theta = 1_000_000.0
    default_eps = 1e-5
    layer_names = LayerNames(mlp=SPARSE)

    def slot_name(self, name: str) -> str:
        return published_name(name)

    def make_feed_forward(self, index: int) -> FeedForward:
        rule = read_rule(self.config.with_values({"norm_topk_prob": True}))
        return MoE(
            Router(index, self.hidden_size, rule, dtype=self.dtype, device=self.device),
            Experts(rule.num_experts, self.hidden_size, self.sizes.intermediate_size, activation=self.activation,
                    names=EXPERT_NAMES, dtype=self.dtype, device=self.device),
        )
