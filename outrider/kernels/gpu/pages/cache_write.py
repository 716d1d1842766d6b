"""Writes keys and values to their tokens' slots, for layers whose projections need no norm and no rotation, or got them
elsewhere. A slot of -1 writes nothing.

Non-finite numbers are contained, head by head. Such values become 0, because attention multiplies the values of tokens
that a query must not see by a weight of 0, and 0 x NaN is NaN. The head's key becomes NaN, so that every token that may
see it fails. `contain_non_finite` in `kernels/reference.py` does this for all heads of a token at once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from outrider.kernels.fp8_cache import HeadScales
from outrider.kernels.gpu.common import (
    FLOATS,
    next_power_of_two,
    pdl_options,
    release_dependents,
    require_tensor,
    uses_pdl,
    wait_for_inputs,
)
from outrider.kernels.gpu.launch.triton_kernel import kernel
from outrider.kernels.gpu.pages.fp8 import as_stored, check_cache_dtype


@triton.jit
def zero_or_nan(x):
    """Return 0 where x is finite, otherwise NaN: a sum of these is NaN if any x is not finite."""
    return x.to(tl.float32) * 0.0


@triton.jit
def contained_values(v):
    return tl.where(tl.abs(v.to(tl.float32)) < float("inf"), v, 0.0)


@kernel(do_not_specialize_on_alignment=["slots", "k_scales", "v_scales"])
def _cache_kernel(
    k, v, slots, k_cache, v_cache, k_scales, v_scales, k_stride, k_head_stride, v_stride, v_head_stride,
    k_page_stride, k_token_stride, k_slot_head_stride, v_page_stride, v_token_stride, v_slot_head_stride,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr,
    PDL: tl.constexpr,
):
    release_dependents(PDL)
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    page, offset = slot // PAGE, slot % PAGE
    row, dim = tl.arange(0, HEADS_PAD), tl.arange(0, D_PAD)[None, :]
    head = row[:, None]
    mask = (head < HEADS) & (dim < D) & (slot >= 0)
    value = tl.load(v + token * v_stride + head * v_head_stride + dim, mask=mask, other=0.0)
    if tl.program_id(1) == 0:
        key = tl.load(k + token * k_stride + head * k_head_stride + dim, mask=mask, other=0.0)
        key += tl.sum(zero_or_nan(key) + zero_or_nan(value), axis=1)[:, None].to(key.dtype)
        tl.store(k_cache + page * k_page_stride + offset * k_token_stride + head * k_slot_head_stride + dim,
                 as_stored(key, k_scales, row, row < HEADS, k_cache), mask)
    else:
        tl.store(v_cache + page * v_page_stride + offset * v_token_stride + head * v_slot_head_stride + dim,
                 as_stored(contained_values(value), v_scales, row, row < HEADS, v_cache), mask)


def cache_write(
    k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *,
    scales: HeadScales | None = None, pdl: bool | None = None,
) -> None:
    """Write k and v [tokens, kv heads, dim] to caches [pages, page_size, kv heads, dim]; slots [tokens] int64. The slot
    of offset o in page p is p * page_size + o."""
    name, device, (_, page_size, num_heads, head_dim) = "cache_write", k.device, k_cache.shape
    pdl = uses_pdl(device) if pdl is None else pdl
    num_tokens = k.shape[0]
    for argument, tensor in (("k", k), ("v", v)):
        require_tensor(name, argument, tensor, (num_tokens, num_heads, head_dim), device, FLOATS)
    require_tensor(name, "slots", slots, (num_tokens,), device, (torch.int64,))
    check_cache_dtype(name, k_cache, v_cache, (None, None, None, None), k, scales)
    if num_tokens:
        _cache_kernel[(num_tokens, 2)](
            k, v, slots, k_cache, v_cache, *(scales or (slots, slots)), k.stride(0), k.stride(1), v.stride(0),
            v.stride(1), *k_cache.stride()[:3], *v_cache.stride()[:3], HEADS=num_heads,
            HEADS_PAD=next_power_of_two(num_heads), D=head_dim, D_PAD=next_power_of_two(head_dim), PAGE=page_size,
            PDL=pdl, num_warps=4, **pdl_options(pdl),
        )
