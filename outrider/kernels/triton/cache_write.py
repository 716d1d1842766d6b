"""Writes finished keys and values to their tokens' slots, for layers whose projections need no norm and no rotation, or
got them elsewhere. A slot of -1 writes nothing. This file knows slots, not requests or owners of pages.
"""

from __future__ import annotations

import torch

import triton
import triton.language as tl
from outrider.kernels.triton.common import (
    FLOATS,
    next_power_of_two,
    pdl_options,
    release_dependents,
    require_tensor,
    uses_pdl,
    wait_for_inputs,
)
from outrider.kernels.triton.launch import kernel


@triton.jit
def _copy_heads(source, target, stored, source_head_stride, target_head_stride, HEADS_PAD: tl.constexpr,
                HEADS: tl.constexpr, D_PAD: tl.constexpr, D: tl.constexpr):  # fmt: skip
    head, dim = tl.arange(0, HEADS_PAD)[:, None], tl.arange(0, D_PAD)[None, :]
    mask = (head < HEADS) & (dim < D) & stored
    tl.store(target + head * target_head_stride + dim, tl.load(source + head * source_head_stride + dim, mask=mask),
             mask=mask)


@kernel(do_not_specialize_on_alignment=["slots"])
def _cache_kernel(
    k, v, slots, k_cache, v_cache, k_stride, k_head_stride, v_stride, v_head_stride,
    k_page_stride, k_token_stride, k_slot_head_stride, v_page_stride, v_token_stride, v_slot_head_stride,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    release_dependents(PDL)
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    page, offset = slot // PAGE, slot % PAGE
    if tl.program_id(1) == 0:
        _copy_heads(k + token * k_stride, k_cache + page * k_page_stride + offset * k_token_stride, slot >= 0,
                    k_head_stride, k_slot_head_stride, HEADS_PAD, HEADS, D_PAD, D)  # fmt: skip
    else:
        _copy_heads(v + token * v_stride, v_cache + page * v_page_stride + offset * v_token_stride, slot >= 0,
                    v_head_stride, v_slot_head_stride, HEADS_PAD, HEADS, D_PAD, D)  # fmt: skip


def cache_write(
    k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *,
    pdl: bool | None = None,
) -> None:
    """k and v [tokens, kv heads, dim] into caches [pages, page_size, kv heads, dim]; slots [tokens] int64. The slot of
    offset o in page p is p * page_size + o."""
    name, device, (_, page_size, num_heads, head_dim) = "cache_write", k.device, k_cache.shape
    pdl = uses_pdl(device) if pdl is None else pdl
    num_tokens = k.shape[0]
    for argument, tensor in (("k", k), ("v", v)):
        require_tensor(name, argument, tensor, (num_tokens, num_heads, head_dim), device, FLOATS)
    require_tensor(name, "slots", slots, (num_tokens,), device, (torch.int64,))
    require_tensor(name, "k_cache", k_cache, (None, None, None, None), device, (k.dtype,))
    require_tensor(name, "v_cache", v_cache, tuple(k_cache.shape), device, (v.dtype,))
    if num_tokens:
        _cache_kernel[(num_tokens, 2)](
            k, v, slots, k_cache, v_cache, k.stride(0), k.stride(1), v.stride(0), v.stride(1), *k_cache.stride()[:3],
            *v_cache.stride()[:3], HEADS=num_heads, HEADS_PAD=next_power_of_two(num_heads), D=head_dim,
            D_PAD=next_power_of_two(head_dim), PAGE=page_size, PDL=pdl, num_warps=4, **pdl_options(pdl),
        )  # fmt: skip
