"""A whole decoder layer as one call of the C code. Its results have the bits of its operations called one by one."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.kernels.native.attention import Attention, RopeWrite, check_attention, check_rows, pack_cache
from outrider.kernels.native.build import library
from outrider.kernels.native.checks import is_matrix, is_vector, takes_heads, takes_rope
from outrider.kernels.native.matrix import Matrix
from outrider.kernels.native.structures import LAYER


class LayerWeights:
    """A decoder layer: norm, one product for q, k and v, attention, output; norm, gated MLP."""

    def __init__(
        self, input_norm: Tensor, mlp_norm: Tensor, eps: float, qkv: Matrix, out: Matrix, gate_up: Matrix,
        down: Matrix, *, gelu: bool, max_tokens: int,
    ) -> None:  # fmt: skip
        assert is_vector(input_norm, qkv.inputs) and is_vector(mlp_norm, qkv.inputs)
        assert qkv.inputs == out.outputs == gate_up.inputs == down.outputs and gate_up.outputs == 2 * down.inputs
        self.max_tokens = max_tokens  # with more token rows another product is faster, and the layer is done in parts
        self.qkv, self.out = qkv, out
        self._owners = (input_norm, mlp_norm, gate_up, down)
        self.packed = LAYER.pack(
            qkv=qkv.packed, out=out.packed, gate_up=gate_up.packed, down=down.packed,
            input_norm=input_norm.data_ptr(), mlp_norm=mlp_norm.data_ptr(), eps=eps, gelu=gelu,
        )  # fmt: skip


def decoder_layer(
    layer: LayerWeights, delta: Tensor | None, residual: Tensor, rope: RopeWrite, attention: Attention
) -> Tensor | None:
    """residual += delta, then attention and MLP of it; returns what the MLP adds, in delta's memory.

    None, with nothing done, if the C code does not take this.
    """
    tokens, hidden = residual.shape
    k_cache, v_cache = rope.k_cache, rope.v_cache
    kv_heads, dim = k_cache.shape[2:]
    heads = layer.out.inputs // dim
    is_taken = (
        tokens <= layer.max_tokens and is_matrix(residual) and residual.is_contiguous()
        and (delta is None or (is_matrix(delta) and delta.is_contiguous() and delta.shape == residual.shape))
        and takes_rope(*rope) and takes_heads(heads, kv_heads, dim)
    )  # fmt: skip
    if not is_taken:
        return None
    result = torch.empty_like(residual) if delta is None else delta
    cache = pack_cache(k_cache, v_cache)
    error = library().decoder_layer(
        layer.packed, rope.pack(tokens, layer.qkv.outputs, cache), attention.pack(0, 0, 0, tokens, heads, cache),
        result.data_ptr(), delta is not None, residual.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    check_rows(max(0, -error))
    check_attention(max(0, error))
    return result
