"""Whole decoder layers as one call of the C code, with the same bits as their operations called one by one.

A layer's weights, cache and settings are checked and packed once (`BoundLayer`), and a step's batch once for all layers
(`LayerStep`): checking and packing everything for every layer would take a fifth as long as the layer itself.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.kernels.cpu.attention import Requests, check_attention, check_rows, pack_cache
from outrider.kernels.cpu.build import library
from outrider.kernels.cpu.checks import is_angles, is_cache, is_index, is_matrix, is_vector, takes_heads
from outrider.kernels.cpu.matrix import Matrix
from outrider.kernels.cpu.structures import BOUND_LAYER, LAYER, LAYER_STEP, LAYER_TARGETS

if TYPE_CHECKING:
    from outrider.kernels.cpu.adapters import LayerDeltas


class LayerWeights:
    """A decoder layer's weights: norm, one product for q, k and v, attention, output projection; norm, gated MLP."""

    def __init__(
        self, input_norm: Tensor, mlp_norm: Tensor, eps: float, qkv: Matrix, out: Matrix, gate_up: Matrix,
        down: Matrix, *, gelu: bool, max_tokens: int,
    ) -> None:
        assert is_vector(input_norm, qkv.inputs) and is_vector(mlp_norm, qkv.inputs)
        assert qkv.inputs == out.outputs == gate_up.inputs == down.outputs and gate_up.outputs == 2 * down.inputs
        self.max_tokens = max_tokens  # with more token rows another product is faster, and the layer is done in parts
        self.qkv, self.out = qkv, out
        self._owners = (input_norm, mlp_norm, gate_up, down)
        self.packed = LAYER.pack(
            qkv=qkv.packed, out=out.packed, gate_up=gate_up.packed, down=down.packed,
            input_norm=input_norm.data_ptr(), mlp_norm=mlp_norm.data_ptr(), eps=eps, gelu=gelu,
        )


class BoundLayer:
    """One or several consecutive layers with their cache, checked and packed for any step. Keeps the weights alive, but
    not the cache. `bind` makes one from a layer; `joined` makes one from several."""

    def __init__(self, max_tokens: int, hidden: int, packed: bytes, owners: tuple[object, ...], count: int = 1) -> None:
        self.max_tokens, self.hidden, self.packed, self.count = max_tokens, hidden, packed, count
        self._owners = owners

    @classmethod
    def joined(cls, layers: Sequence[BoundLayer]) -> BoundLayer:
        """Join layers to one BoundLayer, so that one call computes all of them, which takes less time than a call for
        each."""
        assert len({layer.hidden for layer in layers}) == 1
        return cls(min(layer.max_tokens for layer in layers), layers[0].hidden,
                   b"".join(layer.packed for layer in layers), tuple(layers), sum(layer.count for layer in layers))

    @classmethod
    def bind(
        cls, weights: LayerWeights, k_cache: Tensor, v_cache: Tensor, norms: tuple[Tensor, Tensor] | None = None,
        norm_eps: float = 1e-6, *, scale: float, window: int = 0, is_chunked: bool = False, softcap: float = 0.0,
    ) -> BoundLayer | None:
        """Check and pack a layer with its cache. `norms`: scales of the norms of q and k heads. Returns None if the C
        code does not take these caches or heads."""
        kv_heads, dim = k_cache.shape[2:]
        heads = weights.out.inputs // dim
        q_norm, k_norm = (None, None) if norms is None else norms
        is_taken = (is_cache(k_cache) and is_cache(v_cache) and is_vector(q_norm, dim) and is_vector(k_norm, dim)
                    and takes_heads(heads, kv_heads, dim))
        if not is_taken:
            return None
        assert v_cache.shape == k_cache.shape, "keys and values have caches of one shape"
        assert weights.qkv.outputs == (heads + 2 * kv_heads) * dim, f"qkv has {weights.qkv.outputs} columns"
        packed = BOUND_LAYER.pack(
            weights=weights.packed, cache=pack_cache(k_cache, v_cache),
            q_norm=0 if q_norm is None else q_norm.data_ptr(), k_norm=0 if k_norm is None else k_norm.data_ptr(),
            heads=heads, window=window, norm_eps=norm_eps, scale=scale, softcap=softcap, chunked=is_chunked,
        )
        return cls(weights.max_tokens, weights.qkv.inputs, packed, (weights, norms))


class LayerStep:
    """A step's batch for the layers that share a page table and a rope. Keeps its tensors alive. Made by `build`.

    One layer's output is the next layer's input, so tensors that were just checked are not checked again.
    """

    def __init__(self, owners: tuple[object, ...], tokens: int, packed: bytes) -> None:
        self.tokens, self.packed, self.threads = tokens, packed, torch.get_num_threads()
        self.run_layers = library().decoder_layers
        self.checked: Tensor | None = None
        self.output: Tensor | None = None
        self._owners = owners

    @classmethod
    def build(cls, requests: Requests, positions: Tensor, slots: Tensor, cos: Tensor, sin: Tensor) -> LayerStep | None:
        """Check and pack a step's batch. cos and sin: [positions, half of the rotated columns]. Returns None if the C
        code does not take these tensors."""
        half = cos.shape[1]
        is_taken = (is_index(positions) and is_index(slots) and is_angles(cos, 2 * half) and is_angles(sin, 2 * half)
                    and cos.shape == sin.shape)
        if not is_taken:
            return None
        tokens = positions.shape[0]
        assert slots.shape == (tokens,), "one position and one slot per token row"
        return cls((requests, positions, slots, cos, sin), tokens, LAYER_STEP.pack(
            requests=requests.packed, positions=positions.data_ptr(), slots=slots.data_ptr(), cos=cos.data_ptr(),
            sin=sin.data_ptr(), cos_stride=cos.stride(0), sin_stride=sin.stride(0), max_len=cos.shape[0],
            rotary=2 * half, tokens=tokens,
        ))

    def takes(self, delta: Tensor | None, residual: Tensor, hidden: int) -> bool:
        if residual is not self.checked:
            if not is_matrix(residual) or not residual.is_contiguous() or residual.shape != (self.tokens, hidden):
                return False
            self.checked = residual
        if delta is None or delta is self.output:
            return True
        return is_matrix(delta) and delta.is_contiguous() and delta.shape == residual.shape


def decoder_layer(layer: BoundLayer, step: LayerStep, delta: Tensor | None, residual: Tensor,
                  adapters: LayerDeltas | None = None,
                  aux_states: Mapping[int, Tensor] = MappingProxyType({})) -> Tensor | None:
    """Compute decoder layers: residual += delta, then attention and MLP, for each layer of `layer` in turn. Returns the
    output of the last MLP, in delta's memory. adapters: those of the token rows, with the targets of all these layers.
    aux_states[i], shaped like residual, gets a copy of the residual stream before the i-th layer.

    Returns None, and does nothing, if the C code does not take these arguments."""
    if step.tokens > layer.max_tokens or not step.takes(delta, residual, layer.hidden):
        return None
    if adapters is not None:
        assert adapters.num_rows == step.tokens, "the adapters are of other token rows"
        assert len(adapters.targets) == layer.count * LAYER_TARGETS.size, "the targets are of other layers"
    result = torch.empty_like(residual) if delta is None else delta
    addresses = None
    if aux_states:
        assert all(0 < at < layer.count and aux_state.shape == residual.shape and aux_state.is_contiguous()
                   for at, aux_state in aux_states.items())
        addresses = array("Q", [aux_states[at].data_ptr() if at in aux_states else 0 for at in range(layer.count)])
    error = step.run_layers(
        layer.packed, layer.count, step.packed, None if adapters is None else adapters.packed,
        None if adapters is None else adapters.targets, result.data_ptr(), delta is not None, residual.data_ptr(),
        None if addresses is None else addresses.buffer_info()[0], step.threads,
    )
    if error:
        check_rows(max(0, -error))
        check_attention(max(0, error))
    step.output = result
    return result
