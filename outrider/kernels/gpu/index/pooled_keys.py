"""Computes the indexer's keys for whole blocks of tokens in latent attention, and lists the positions of chosen blocks.

`kernels/pooled_keys.py` defines both. In one kernel each program writes one token's key and gate, or the key of the
block that the token completes. Another kernel lists the positions, one token row per program. Nothing is read on the
host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from outrider.kernels.gpu.common import (
    FLOATS,
    cdiv,
    next_power_of_two,
    pdl_options,
    release_dependents,
    require,
    require_tensor,
    uses_pdl,
    wait_for_inputs,
)
from outrider.kernels.gpu.launch.triton_kernel import kernel
from outrider.kernels.latent import TokenContexts
from outrider.kernels.pooled_keys import PoolCells, PoolWeights
from outrider.kernels.token_blocks import TokenBlocks

_INTEGERS = (torch.int32, torch.int64)
_WRITE_INTS = ["slots", "positions", "offsets", "page_table", "request_of"]
_LIST_INTS = ["first", "stop", "chosen"]
_ENTRIES = 1024  # positions of a program that lists them


@triton.jit
def _normed(source, norm_weight, norm_bias, eps, dim, mask, D: tl.constexpr, dtype: tl.constexpr):
    """Apply the layer norm to a key, and round it to the dtype in which it is stored."""
    value = tl.load(source + dim, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(value, axis=0) / D
    apart = tl.where(dim < D, value - mean, 0.0)
    spread = tl.rsqrt(tl.sum(apart * apart, axis=0) / D + eps)
    gain = tl.load(norm_weight + dim, mask=dim < D, other=0.0).to(tl.float32)
    shift = tl.load(norm_bias + dim, mask=dim < D, other=0.0).to(tl.float32)
    return (apart * spread * gain + shift).to(dtype)


@kernel(do_not_specialize_on_alignment=_WRITE_INTS)
def _write_pooled_kernel(
    packed, norm_weight, norm_bias, place_bias, slots, positions, offsets, page_table, request_of, keys, gates,
    head_weights, eps, head_scale, packed_stride, bias_stride, table_stride, key_page_stride, key_stride,
    gate_page_stride, gate_stride,
    SIZE: tl.constexpr, ANCHOR: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):
    release_dependents(PDL)
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    source = packed + token * packed_stride
    head = tl.arange(0, HEADS_PAD)
    weight = tl.load(source + D + head, mask=head < HEADS, other=0.0).to(tl.float32)
    tl.store(head_weights + token * HEADS + head, weight * head_scale, mask=head < HEADS)
    slot = tl.load(slots + token)
    if slot >= 0:
        dim = tl.arange(0, D_PAD)
        valid = dim < D
        dtype: tl.constexpr = keys.dtype.element_ty
        own = _normed(source, norm_weight, norm_bias, eps, dim, valid, D, dtype)
        page, cell = slot // PAGE, slot % PAGE
        gate = tl.load(source + D + HEADS + dim, mask=valid, other=0.0)
        tl.store(gates + page * gate_page_stride + cell * gate_stride + dim, gate, mask=valid)
        begin = tl.load(positions + token) - (SIZE - 1)
        if (begin >= ANCHOR) & ((begin - ANCHOR) % SIZE == 0):
            offset = tl.load(offsets + token)
            pages = page_table + tl.load(request_of + token) * table_stride
            peak = tl.full([D_PAD], float("-inf"), dtype=tl.float32)
            total, acc = tl.zeros([D_PAD], dtype=tl.float32), tl.zeros([D_PAD], dtype=tl.float32)
            for place in range(0, SIZE):
                back, position = SIZE - 1 - place, begin + place
                in_step = back <= offset  # then nothing of the token is in the cache yet
                given = source - back * packed_stride
                of_step, of_cache = valid & in_step, valid & (offset < back)
                kept = tl.load(pages + position // PAGE, mask=offset < back, other=0).to(tl.int64)
                at = position % PAGE
                key = _normed(given, norm_weight, norm_bias, eps, dim, of_step, D, dtype).to(tl.float32)
                stored = tl.load(keys + kept * key_page_stride + at * key_stride + dim, mask=of_cache, other=0.0)
                key = tl.where(in_step, key, stored.to(tl.float32))
                logit = tl.load(given + D + HEADS + dim, mask=of_step, other=0.0).to(tl.float32)
                stored = tl.load(gates + kept * gate_page_stride + at * gate_stride + dim, mask=of_cache, other=0.0)
                logit = tl.where(in_step, logit, stored.to(tl.float32))
                logit += tl.load(place_bias + place * bias_stride + dim, mask=valid, other=0.0).to(tl.float32)
                higher = tl.maximum(peak, logit)
                shrink, share = tl.exp(peak - higher), tl.exp(logit - higher)
                total, acc, peak = total * shrink + share, acc * shrink + share * key, higher
            own = (acc / total).to(dtype)
        tl.store(keys + page * key_page_stride + cell * key_stride + dim, own, mask=valid)


def write_pooled_keys(
    packed: torch.Tensor, weights: PoolWeights, cells: PoolCells, contexts: TokenContexts, blocks: TokenBlocks, *,
    pdl: bool | None = None,
) -> torch.Tensor:
    """Write the keys and gates of the step's tokens, and the keys of the blocks that they complete; see
    `kernels.pooled_keys.write_pooled_keys` for the arguments."""
    name, device, dtype = "write_pooled_keys", packed.device, packed.dtype
    pdl = uses_pdl(device) if pdl is None else pdl
    require_tensor(name, "packed", packed, (None, None), device, FLOATS)
    num_tokens, dim = packed.shape[0], len(weights.norm_weight)
    num_heads = packed.shape[1] - 2 * dim
    require(num_heads > 0, name, "packed", f"has {packed.shape[1]} columns, expected more than two keys of {dim}")
    for argument in ("norm_weight", "norm_bias"):
        require_tensor(name, argument, getattr(weights, argument), (dim,), device, FLOATS)
    require_tensor(name, "place_bias", weights.place_bias, (blocks.size, dim), device, FLOATS)
    for argument in ("slots", "positions", "offsets"):
        require_tensor(name, argument, getattr(cells, argument), (num_tokens,), device, (torch.int64,))
    keys, gates = cells.keys, cells.gates
    require_tensor(name, "keys", keys, (None, None, dim), device, (dtype,))
    require_tensor(name, "gates", gates, tuple(keys.shape), device, (dtype,))
    require_tensor(name, "page_table", contexts.page_table, (None, None), device, _INTEGERS)
    require_tensor(name, "request_of", contexts.request_of, (num_tokens,), device, _INTEGERS)
    head_weights = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=device)
    if num_tokens:
        _write_pooled_kernel[(num_tokens,)](
            packed, weights.norm_weight, weights.norm_bias, weights.place_bias, cells.slots, cells.positions,
            cells.offsets, contexts.page_table, contexts.request_of, keys, gates, head_weights, weights.eps,
            weights.head_scale, packed.stride(0), weights.place_bias.stride(0), contexts.page_table.stride(0),
            *keys.stride()[:2], *gates.stride()[:2], SIZE=blocks.size, ANCHOR=blocks.anchor, D=dim,
            D_PAD=next_power_of_two(dim), HEADS=num_heads, HEADS_PAD=next_power_of_two(num_heads), PAGE=keys.shape[1],
            PDL=pdl, num_warps=1 if dim <= 256 else 4, **pdl_options(pdl),
        )
    return head_weights


@kernel(do_not_specialize_on_alignment=_LIST_INTS)
def _list_kernel(first, stop, chosen, listed, chosen_stride, SIZE: tl.constexpr, ANCHOR: tl.constexpr,
                 SHIFT: tl.constexpr, TOP: tl.constexpr, TOP_PAD: tl.constexpr, ENTRIES: tl.constexpr,
                 BLOCK: tl.constexpr, PDL: tl.constexpr):
    release_dependents(PDL)
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    low, high = tl.load(first + token).to(tl.int32), tl.load(stop + token).to(tl.int32)
    place = tl.arange(0, TOP_PAD)
    own = chosen + token * chosen_stride
    is_chosen = tl.load(own + place, mask=place < TOP, other=-1) >= 0
    num_chosen = tl.sum(tl.where(is_chosen, 1, 0), axis=0) * SIZE
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tail = tl.maximum(ANCHOR + tl.maximum(high - ANCHOR, 0) // SIZE * SIZE, low)
    block = tl.load(own + entry // SIZE, mask=entry < num_chosen, other=0).to(tl.int32)
    position = tl.where(entry < num_chosen, ANCHOR + (block - SHIFT) * SIZE + entry % SIZE, tail + entry - num_chosen)
    position = tl.where(high - low <= ENTRIES, low + entry, position)
    position = tl.where(position < high, position, -1)
    tl.store(listed + token * ENTRIES + entry, position, mask=entry < ENTRIES)


def list_blocks(contexts: TokenContexts, chosen: torch.Tensor, blocks: TokenBlocks, *,
                pdl: bool | None = None) -> torch.Tensor:
    """List the positions of each token row's chosen blocks; see `kernels.pooled_keys.list_blocks` for the arguments."""
    name, device = "list_blocks", chosen.device
    pdl = uses_pdl(device) if pdl is None else pdl
    require_tensor(name, "chosen", chosen, (None, None), device, _INTEGERS)
    num_tokens, top = chosen.shape
    for argument in ("first", "stop"):
        require_tensor(name, argument, getattr(contexts, argument), (num_tokens,), device, _INTEGERS)
    entries = (top + 1) * blocks.size - 1
    listed = torch.empty(num_tokens, entries, dtype=torch.int32, device=device)
    if listed.numel():
        _list_kernel[(num_tokens, cdiv(entries, _ENTRIES))](
            contexts.first, contexts.stop, chosen, listed, chosen.stride(0), SIZE=blocks.size,
            ANCHOR=blocks.anchor, SHIFT=blocks.shift, TOP=top, TOP_PAD=next_power_of_two(top), ENTRIES=entries,
            BLOCK=_ENTRIES, PDL=pdl, num_warps=4, **pdl_options(pdl),
        )
    return listed
