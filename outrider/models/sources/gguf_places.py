"""The places of a GGUF file's tensors in the models: their Hugging Face names, and the changes that converters make.

Converters add 1 to the weights of norms that scale by 1 + weight, store decays instead of their logarithms, and reorder
the rows of some matrices. The order of rows is restored without dequantising. A tensor whose numbers must be changed is
dequantised first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from outrider.models.sources.gguf_metadata import Metadata
from outrider.models.sources.model_source import SourceError

if TYPE_CHECKING:
    import torch

Change: TypeAlias = Callable[..., "torch.Tensor"]  # from the numbers in the file to the model's
RowOrder: TypeAlias = Callable[[Metadata, int], np.ndarray]  # of a tensor's rows: those of the model, in its order


class HeadGrid(NamedTuple):
    """The sizes of heads whose input features the file stores as [heads, groups, features of a head]. The model stores
    them as [groups, heads, features of a head]."""

    groups: int
    heads: int  # of a group
    size: int  # features of a head


class TensorPlace(NamedTuple):
    """The place in the model for a tensor of the file. A name with "{expert}" means one matrix for each expert."""

    name: str
    rows: RowOrder | None = None  # None: all rows, as they are
    change: Change | None = None
    beside: str | None = None  # a second tensor of the layer, which `change` joins to this one
    columns: Callable[[Metadata], HeadGrid | None] | None = None  # None: input features as they are


# The places of a layer's tensors, by their names behind "blk.0.". Without a place: another tensor's place takes it.
Places: TypeAlias = Mapping[str, tuple[TensorPlace, ...]]


def weights(names: Mapping[str, str], change: Change | None = None) -> dict[str, tuple[TensorPlace, ...]]:
    """Return the places of weights whose rows have the same order in the file and the model. names: the model's name
    for each name in the file, without ".weight"."""
    return {f"{ours}.weight": (TensorPlace(f"{theirs}.weight", change=change),) for ours, theirs in names.items()}


def attention(prefix: str = "self_attn") -> dict[str, tuple[TensorPlace, ...]]:
    return weights({"attn_q": f"{prefix}.q_proj", "attn_k": f"{prefix}.k_proj", "attn_v": f"{prefix}.v_proj",
                    "attn_output": f"{prefix}.o_proj"})


def experts(prefix: str = "mlp.", router: str = "mlp.gate") -> dict[str, tuple[TensorPlace, ...]]:
    """Return the places of the router and the experts. A file may have gate and up in one tensor."""
    parts = {f"ffn_{part}_exps": f"{prefix}experts.{{expert}}.{part}_proj" for part in ("gate", "up", "down")}
    gate_up = (TensorPlace(f"{prefix}experts.{{expert}}.gate_proj.weight", _first_half),
               TensorPlace(f"{prefix}experts.{{expert}}.up_proj.weight", _second_half))
    return {**weights({"ffn_gate_inp": router, **parts}), "ffn_gate_up_exps.weight": gate_up}


def shared_expert(prefix: str) -> dict[str, tuple[TensorPlace, ...]]:
    return weights({f"ffn_{part}_shexp": f"{prefix}.{part}_proj" for part in ("gate", "up", "down")})


# Changes of numbers


def subtract_one(norm: torch.Tensor) -> torch.Tensor:
    return norm - 1


def _decay_to_log(decay: torch.Tensor) -> torch.Tensor:
    return (-decay).log().flatten()


def _flattened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten()


def _one_row(tensor: torch.Tensor) -> torch.Tensor:
    """Restore a dimension of size one that writers leave out."""
    return tensor.view(1, -1)


def _one_filter_each(conv: torch.Tensor) -> torch.Tensor:
    return conv[:, None]


def _join_latents(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Join the key and value parts of a latent expansion: [heads, latent, nope] and [heads, value, latent] -> [heads *
    (nope + value), latent]."""
    import torch

    return torch.cat((keys.transpose(1, 2), values), dim=1).flatten(0, 1)


# Orders of rows


def halves_of_heads(key: str) -> RowOrder:
    """Return the order of rows for Llama's rope, because the file interleaves the two halves of each head. `key`: the
    metadata key with the number of heads."""

    def rows(meta: Metadata, count: int) -> np.ndarray:
        heads = _largest(meta.get(key)) or _largest(meta.need("attention.head_count"))
        return np.arange(count).reshape(heads, -1, 2).swapaxes(1, 2).ravel()

    return rows


def reordered(prefix: str) -> dict[str, tuple[TensorPlace, ...]]:
    """Return the places of queries and keys, in files of a converter that interleaves their rows for Llama's rope."""
    return {"attn_q.weight": (TensorPlace(f"{prefix}.q_proj.weight", halves_of_heads("attention.head_count")),),
            "attn_k.weight": (TensorPlace(f"{prefix}.k_proj.weight", halves_of_heads("attention.head_count_kv")),)}


def _largest(value: int | list[int] | None) -> int:
    """Return the number of heads. If each layer has its own number, this is the largest, because layers without
    attention have 0."""
    return max(value) if isinstance(value, list) else value or 0


def _first_half(meta: Metadata, count: int) -> np.ndarray:
    return np.arange(count // 2)


def _second_half(meta: Metadata, count: int) -> np.ndarray:
    return np.arange(count // 2, count)


class DeltaHeads(NamedTuple):
    """The head sizes of a gated delta layer."""

    keys: int  # key heads
    repeats: int  # value heads of a key head
    key_size: int
    value_size: int  # features of a value head

    @classmethod
    def read(cls, meta: Metadata) -> DeltaHeads:
        keys, values = meta.need("ssm.group_count"), meta.need("ssm.time_step_rank")
        inner = meta.need("ssm.inner_size")
        if values % keys or inner % values:
            raise SourceError(f"{meta.header.path}: {meta.prefix}ssm.*: {values} value heads of {inner} features "
                              f"cannot be divided evenly among {keys} key heads; fetch the file again")
        return cls(keys, values // keys, meta.need("ssm.state_size"), inner // values)


def _tiled_value_rows(meta: Metadata, count: int) -> np.ndarray:
    """Return the order of value rows. The file has the first value head of every key head, then the second of every
    one; the model has the value heads of a key head together. Rows of queries and keys, if any, come first and stay."""
    heads = DeltaHeads.read(meta)
    num_values = heads.keys * heads.repeats
    before = 2 * heads.keys * heads.key_size if count > num_values * heads.value_size else 0
    values = np.arange(before, count).reshape(heads.repeats, heads.keys, -1).swapaxes(0, 1)
    return np.concatenate((np.arange(before), values.ravel()))


def _tiled_value_columns(meta: Metadata) -> HeadGrid | None:
    heads = DeltaHeads.read(meta)
    return HeadGrid(heads.keys, heads.repeats, heads.value_size) if heads.repeats > 1 and heads.keys > 1 else None


def _share_of_key_heads(start: int, stop: int) -> RowOrder:
    """Return the row order that takes the parts from `start` to `stop` out of a tensor that stores (q, k, v, z) or (b,
    a) key head by key head."""

    def rows(meta: Metadata, count: int) -> np.ndarray:
        heads = DeltaHeads.read(meta)
        values = heads.repeats * heads.value_size
        sizes = [heads.key_size, heads.key_size, values, values]
        if count == 2 * heads.keys * heads.repeats:
            sizes = [heads.repeats, heads.repeats]
        by_head = np.arange(count).reshape(heads.keys, sum(sizes))
        parts = np.split(by_head, np.cumsum(sizes)[:-1], axis=1)
        return np.concatenate([part.ravel() for part in parts[start:stop]])

    return rows


# Layers of the families

ATTENTION, EXPERTS = attention(), experts()
MLP = weights({f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")})
TWO_NORMS = weights({"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"})
HEAD_NORMS = weights({"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"})
BIASES = {f"attn_{part}.bias": (TensorPlace(f"self_attn.{part}_proj.bias"),) for part in "qkv"}
REORDERED = reordered("self_attn")
_GEMMA_NORMS = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm",
                "ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
                "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
GEMMA_NORMS = weights(_GEMMA_NORMS, subtract_one)

SANDWICHED = weights({"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"})
SEED_NORMS = weights({"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"})
LFM2 = {
    **attention(),
    **weights({"attn_output": "self_attn.out_proj", "attn_q_norm": "self_attn.q_layernorm",
               "attn_k_norm": "self_attn.k_layernorm", "attn_norm": "operator_norm", "ffn_norm": "ffn_norm",
               "shortconv.in_proj": "conv.in_proj", "shortconv.out_proj": "conv.out_proj",
               "ffn_gate": "feed_forward.w1", "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2"}),
    **experts("feed_forward.", "feed_forward.gate"),
    **weights({"shortconv.conv": "conv.conv"}, _one_filter_each),
    "exp_probs_b.bias": (TensorPlace("feed_forward.expert_bias"),),
}
GEMMA4 = {
    **ATTENTION, **MLP, **weights(_GEMMA_NORMS), **experts("", "router.proj"),
    **weights({"post_ffw_norm_1": "post_feedforward_layernorm_1", "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
               "post_ffw_norm_2": "post_feedforward_layernorm_2", "inp_gate": "per_layer_input_gate",
               "proj": "per_layer_projection", "post_norm": "post_per_layer_input_norm"}),
    "layer_output_scale.weight": (TensorPlace("layer_scalar"),),
    "ffn_gate_inp.scale": (TensorPlace("router.scale"),),
    "ffn_down_exps.scale": (TensorPlace("router.per_expert_scale"),),
}

DEEPSEEK = {
    **MLP, **TWO_NORMS, **EXPERTS, **shared_expert("mlp.shared_experts"),
    **weights({"attn_q": "self_attn.q_proj", "attn_q_a": "self_attn.q_a_proj", "attn_q_b": "self_attn.q_b_proj",
               "attn_q_a_norm": "self_attn.q_a_layernorm", "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
               "attn_kv_a_norm": "self_attn.kv_a_layernorm", "attn_kv_b": "self_attn.kv_b_proj",
               "attn_output": "self_attn.o_proj"}),
    "attn_k_b.weight": (TensorPlace("self_attn.kv_b_proj.weight", change=_join_latents, beside="attn_v_b.weight"),),
    "attn_v_b.weight": (),
    "exp_probs_b.bias": (TensorPlace("mlp.gate.e_score_correction_bias"),),
}
DEEPSEEK_INDEXED = {
    **DEEPSEEK,
    **weights({"indexer.attn_k": "self_attn.indexer.wk", "indexer.attn_q_b": "self_attn.indexer.wq_b",
               "indexer.proj": "self_attn.indexer.weights_proj", "indexer.k_norm": "self_attn.indexer.k_norm"}),
    "indexer.k_norm.bias": (TensorPlace("self_attn.indexer.k_norm.bias"),),
}

NEMOTRON_H = {
    **attention("mixer"),
    # Nothing rotates them, and scores are the same in every order: deltas need the order of the model's makers.
    **reordered("mixer"),
    **experts("mixer.", "mixer.gate"), **shared_expert("mixer.shared_experts"),
    **weights({"attn_norm": "norm", "ssm_in": "mixer.in_proj", "ssm_out": "mixer.out_proj", "ffn_up": "mixer.up_proj",
               "ffn_down": "mixer.down_proj", "ffn_latent_down": "mixer.fc1_latent_proj",
               "ffn_latent_up": "mixer.fc2_latent_proj"}),
    "ssm_conv1d.weight": (TensorPlace("mixer.conv1d.weight", change=_one_filter_each),),
    "ssm_conv1d.bias": (TensorPlace("mixer.conv1d.bias"),),
    "ssm_dt.bias": (TensorPlace("mixer.dt_bias"),),
    "ssm_a": (TensorPlace("mixer.A_log", change=_decay_to_log),),
    "ssm_d": (TensorPlace("mixer.D", change=_flattened),),
    "ssm_norm.weight": (TensorPlace("mixer.norm.weight", change=_flattened),),
    "exp_probs_b.bias": (TensorPlace("mixer.gate.e_score_correction_bias"),),
}


def _gated_delta(value_rows: RowOrder | None) -> dict[str, tuple[TensorPlace, ...]]:
    """Return the places of a gated delta layer's tensors. `value_rows`: the order of value heads in the file."""
    columns = None if value_rows is None else _tiled_value_columns
    return {
        "attn_qkv.weight": (TensorPlace("linear_attn.in_proj_qkv.weight", value_rows),),
        "attn_gate.weight": (TensorPlace("linear_attn.in_proj_z.weight", value_rows),),
        "ssm_beta.weight": (TensorPlace("linear_attn.in_proj_b.weight", value_rows),),
        "ssm_alpha.weight": (TensorPlace("linear_attn.in_proj_a.weight", value_rows),),
        "ssm_conv1d.weight": (TensorPlace("linear_attn.conv1d.weight", value_rows, _one_filter_each),),
        "ssm_a": (TensorPlace("linear_attn.A_log", value_rows, _decay_to_log),),
        "ssm_dt.bias": (TensorPlace("linear_attn.dt_bias", value_rows),),
        "ssm_norm.weight": (TensorPlace("linear_attn.norm.weight"),),
        "ssm_out.weight": (TensorPlace("linear_attn.out_proj.weight", columns=columns),),
    }


_GATED_ATTENTION = {
    **ATTENTION, **MLP, **EXPERTS, **shared_expert("mlp.shared_expert"),
    **weights({"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm",
               "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}, subtract_one),
    "ffn_gate_inp_shexp.weight": (TensorPlace("mlp.shared_expert_gate.weight", change=_one_row),),
}
QWEN3_NEXT = {
    **_GATED_ATTENTION, **_gated_delta(None),
    "ssm_ba.weight": (TensorPlace("linear_attn.in_proj_b.weight", _share_of_key_heads(0, 1)),
                      TensorPlace("linear_attn.in_proj_a.weight", _share_of_key_heads(1, 2))),
    "ssm_in.weight": (TensorPlace("linear_attn.in_proj_qkv.weight", _share_of_key_heads(0, 3)),  # of older files
                      TensorPlace("linear_attn.in_proj_z.weight", _share_of_key_heads(3, 4))),
}
QWEN3_5 = {**_GATED_ATTENTION, **_gated_delta(_tiled_value_rows)}
