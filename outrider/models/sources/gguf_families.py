"""The architectures of GGUF files that are read: for each the config and the names that its model has elsewhere.

A family is one declaration: what its metadata means, how its tensors are called in Hugging Face's form, and what
converters change in them. Converters store norms that add one with the one added, and Llama's q and k with rows that
are reordered for another rope. Keys that no family reads are refused (`Metadata`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from outrider.models.sources.base import SourceError
from outrider.models.sources.gguf_header import Header

if TYPE_CHECKING:
    import torch

ROPE_FACTORS = "rope_freqs.weight"  # not a weight: divisors of the rope's frequencies
HARMLESS = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned")  # keys that change nothing, or are said twice


class Metadata:
    """The keys of a file's architecture. Those that are never read are refused."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self.prefix = f"{header.metadata.get('general.architecture')}."
        self._read = {self.prefix + key for key in HARMLESS}

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(self.prefix + key)
        return self.header.metadata.get(self.prefix + key, default)

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise SourceError(f"{self.header.path}: metadata {self.prefix}{key} is missing; the file is damaged or "
                              "incomplete")
        return value

    def need_number(self, key: str) -> Any:
        """A value that is the same in all layers."""
        value = self.need(key)
        if isinstance(value, list):
            raise SourceError(f"{self.header.path}: {self.prefix}{key} per layer is not supported")
        return value

    def must_equal(self, key: str, value: Any, why: str) -> None:
        found = self.get(key, value)
        if found != value:
            raise SourceError(f"{self.header.path}: {self.prefix}{key} = {found!r} is not supported{why}")

    def refuse_unread(self) -> None:
        for key, value in self.header.metadata.items():
            if key.startswith(self.prefix) and key not in self._read:
                raise SourceError(f"{self.header.path}: {key} = {value!r} is not supported")


Change = Callable[["torch.Tensor"], "torch.Tensor"]


class TensorPlace(NamedTuple):
    """A place in the model for a tensor of the file. With "{expert}" in its name, one matrix for each expert."""

    name: str
    heads: str | None = None  # the key of the number of heads by which rows are reordered; None: as they are
    change: Change | None = None  # from the values in the file to the model's


@dataclass(frozen=True)
class Family:
    architecture: str  # in a config's `architectures`
    model_type: str
    layer: Mapping[str, TensorPlace]  # tensors of a layer, by their names behind "blk.0."
    config: Callable[[Metadata], dict[str, Any]] = field(default=lambda meta: {})  # keys beside those of all families
    norm: Change | None = None  # of the last norm

    def place(self, name: str) -> TensorPlace | None:
        """The place of a tensor, or None if the family has none of this name."""
        if name == "output_norm.weight":
            return TensorPlace("model.norm.weight", change=self.norm)
        if name in TOP_NAMES:
            return TensorPlace(TOP_NAMES[name])
        found = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
        place = self.layer.get(found[2]) if found else None
        return place._replace(name=f"model.layers.{found[1]}.{place.name}") if found and place else None


TOP_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output.weight": "lm_head.weight"}


def _subtract_one(norm: torch.Tensor) -> torch.Tensor:
    return norm - 1


def _weights(names: Mapping[str, str], change: Change | None = None) -> dict[str, TensorPlace]:
    return {f"{ours}.weight": TensorPlace(f"{theirs}.weight", change=change) for ours, theirs in names.items()}


ATTENTION = _weights({"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
                      "attn_output": "self_attn.o_proj"})
MLP = _weights({"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"})
EXPERTS = _weights({"ffn_gate_inp": "mlp.gate", **{f"ffn_{part}_exps": f"mlp.experts.{{expert}}.{part}_proj"
                                                   for part in ("gate", "up", "down")}})
TWO_NORMS = _weights({"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"})
HEAD_NORMS = _weights({"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"})
BIASES = {f"attn_{part}.bias": TensorPlace(f"self_attn.{part}_proj.bias") for part in "qkv"}
REORDERED = {"attn_q.weight": TensorPlace("self_attn.q_proj.weight", "attention.head_count"),
             "attn_k.weight": TensorPlace("self_attn.k_proj.weight", "attention.head_count_kv")}  # fmt: skip
GEMMA_NORMS = _weights({"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm",
                        "ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
                        "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}, _subtract_one)


def _llama(meta: Metadata) -> dict[str, Any]:
    meta.must_equal("expert_count", 0, " (mixture of experts) from GGUF; use the model's safetensors folder")
    meta.get("expert_used_count")
    return {"attention_bias": False, "mlp_bias": False}


def _qwen3_moe(meta: Metadata) -> dict[str, Any]:
    return {"num_experts": meta.need("expert_count"), "num_experts_per_tok": meta.need("expert_used_count"),
            "moe_intermediate_size": meta.need("expert_feed_forward_length"), "norm_topk_prob": True,
            "attention_bias": False}  # fmt: skip


def _gemma3(meta: Metadata) -> dict[str, Any]:
    """Every sixth layer has full attention. Queries of the 27B model, of 62 layers, are scaled by another size."""
    layers, heads = meta.need("block_count"), meta.need("attention.head_count")
    scalar = meta.need("embedding_length") // heads if layers == 62 else meta.need("attention.key_length")
    return {"hidden_act": None, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": scalar,
            "sliding_window": meta.need("attention.sliding_window"), "sliding_window_pattern": 6,
            "rope_local_base_freq": meta.get("rope.freq_base_swa", 10000.0)}  # fmt: skip


FAMILIES = {
    "llama": Family("LlamaForCausalLM", "llama", ATTENTION | REORDERED | MLP | TWO_NORMS, _llama),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2", ATTENTION | BIASES | MLP | TWO_NORMS),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3", ATTENTION | HEAD_NORMS | MLP | TWO_NORMS),
    "qwen3moe": Family("Qwen3MoeForCausalLM", "qwen3_moe", ATTENTION | HEAD_NORMS | EXPERTS | TWO_NORMS, _qwen3_moe),
    "gemma3": Family("Gemma3ForCausalLM", "gemma3_text", ATTENTION | MLP | GEMMA_NORMS, _gemma3, _subtract_one),
}
