"""ERNIE 4.5, dense and with experts: Llama with a rope that rotates pairs of neighbouring dimensions, and experts that
are chosen by corrected scores."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.kernels.moe import RouteRule
from outrider.layers import Experts, FeedForward, Module, MoE, Parameter, Router
from outrider.models.config import ConfigReader
from outrider.models.llama import Llama


class Ernie(Llama):
    """Model class for Ernie4_5ForCausalLM."""

    default_theta = 500_000.0
    default_tied = True
    default_eps = 1e-5
    default_head_dim: int | None = 128
    rotates_pairs = True

    def biases(self, config: ConfigReader) -> tuple[bool, bool, bool]:
        bias = config.get("use_bias", bool, False)
        return bias, bias, bias


class ErnieRouter(Router):
    """A router whose score correction is stored beside the gate's matrix, as a tensor with two axes [1, experts]."""

    def parts(self) -> Sequence[tuple[str, Module]]:
        assert self.bias is not None
        return [("gate", self.gate), ("moe_statics.e_score_correction_bias", Parameter(self.bias.view(1, -1)))]


class ErnieMoe(Ernie):
    """Model class for Ernie4_5_MoeForCausalLM."""

    default_head_dim = None

    def __init__(
        self, config: ConfigReader, *, dtype: torch.dtype, device: torch.device, max_len: int | None = None
    ) -> None:
        config.must_equal("use_bias", False, default=False)
        for key, only in (("moe_gate", "topk"), ("moe_use_aux_free", True), ("moe_gate_act", "softmax"),
                          ("moe_use_hard_gate", False), ("moe_multimodal_paired_experts", False)):
            config.must_equal(key, only, default=only)
        config.passes_over("moe_capacity", "moe_norm_min", "moe_dropout_prob", "moe_aux_loss_lambda",
                           "moe_orthogonal_loss_lambda", "moe_z_loss_lambda", "moe_group", "moe_all_to_all_dropout")
        super().__init__(config, dtype=dtype, device=device, max_len=max_len)

    def slot_name(self, name: str) -> str:
        """Return the slot for a tensor's name. The score correction is beside the router in published files, and inside
        it in transformers' modules."""
        return super().slot_name(name.replace(".gate.moe_statics.", ".moe_statics."))

    def ignores(self, name: str) -> bool:
        return super().ignores(name) or name.startswith(("model.mtp_", "mtp_"))

    def make_feed_forward(self, index: int) -> FeedForward:
        config, hidden_size = self.config, self.hidden_size
        first, last = config.get("moe_layer_start_index", int, 1), config.get("moe_layer_end_index", int, -1, least=-1)
        every = config.get("moe_layer_interval", int, 1, least=1)
        is_sparse = index >= first and (index + 1) % every == 0 and (last == -1 or index <= last)
        if not is_sparse:
            return self.make_mlp(self.sizes.intermediate_size)
        num_experts, top_k = config.required("moe_num_experts", int), config.required("moe_k", int)
        if top_k > num_experts:
            raise config.refusal("moe_k", f"it must be at most the number of experts, {num_experts} (moe_num_experts)")
        width = config.required("moe_intermediate_size", int)
        num_shared = config.get("moe_num_shared_experts", int, 2)
        rule = RouteRule(num_experts, top_k)
        return MoE(
            ErnieRouter(index, hidden_size, rule, has_bias=True, dtype=self.dtype, device=self.device),
            Experts(num_experts, hidden_size, width, activation=self.activation, dtype=self.dtype, device=self.device),
            shared=self.make_mlp(num_shared * width) if num_shared else None, router_name="",
        )
