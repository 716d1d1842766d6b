"""Clearing and copying whole pages of the pool.

Page ids are data on the device; a negative id is padding and touches nothing. Sources and targets of one copy call
must not overlap: programs run in no order.
"""

from __future__ import annotations

import torch

import triton
import triton.language as tl
from outrider.kernels.triton.common import require, require_tensor
from outrider.kernels.triton.launch import kernel

_WORDS = 2048


@kernel(do_not_specialize_on_alignment=["page_ids"])
def _clear_kernel(pool, page_ids, page_stride, page_words, WORDS: tl.constexpr):
    page = tl.load(page_ids + tl.program_id(1)).to(tl.int64)
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    zero = tl.zeros([WORDS], dtype=pool.dtype.element_ty)
    tl.store(pool + page * page_stride + word, zero, mask=(word < page_words) & (page >= 0))


@kernel(do_not_specialize_on_alignment=["source_ids", "target_ids"])
def _copy_kernel(pool, source_ids, target_ids, page_stride, page_words, WORDS: tl.constexpr):
    source = tl.load(source_ids + tl.program_id(1)).to(tl.int64)
    target = tl.load(target_ids + tl.program_id(1)).to(tl.int64)
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    valid = (word < page_words) & (source >= 0) & (target >= 0)
    value = tl.load(pool + source * page_stride + word, mask=valid)
    tl.store(pool + target * page_stride + word, value, mask=valid)


def _as_words(kernel: str, pool: torch.Tensor) -> torch.Tensor:
    """The pool in the widest words its page size allows: one word per lane is then one wide access."""
    require_tensor(kernel, "pool", pool, (None, None), pool.device, (torch.uint8,))
    page_bytes = pool.shape[1]
    require(page_bytes > 0, kernel, "pool", "has empty pages")
    for dtype in (torch.int64, torch.int32):
        size = dtype.itemsize
        if page_bytes % size == 0 and pool.stride(0) % size == 0 and pool.data_ptr() % size == 0:
            return pool.view(dtype)
    return pool


def clear_pages(pool: torch.Tensor, page_ids: torch.Tensor) -> None:
    """Zeroes pages of pool [pages, page bytes] uint8 by page_ids [n] int32."""
    words = _as_words("clear_pages", pool)
    require_tensor("clear_pages", "page_ids", page_ids, (None,), pool.device, (torch.int32,))
    if page_ids.shape[0] == 0:
        return
    grid = (triton.cdiv(words.shape[1], _WORDS), page_ids.shape[0])
    _clear_kernel[grid](words, page_ids, words.stride(0), words.shape[1], WORDS=_WORDS, num_warps=4)


def copy_pages(pool: torch.Tensor, source_ids: torch.Tensor, target_ids: torch.Tensor) -> None:
    """Copies page source_ids[i] of the pool onto page target_ids[i]; both int32."""
    words = _as_words("copy_pages", pool)
    require_tensor("copy_pages", "source_ids", source_ids, (None,), pool.device, (torch.int32,))
    require_tensor("copy_pages", "target_ids", target_ids, (source_ids.shape[0],), pool.device, (torch.int32,))
    if source_ids.shape[0] == 0:
        return
    grid = (triton.cdiv(words.shape[1], _WORDS), source_ids.shape[0])
    _copy_kernel[grid](words, source_ids, target_ids, words.stride(0), words.shape[1], WORDS=_WORDS, num_warps=4)
