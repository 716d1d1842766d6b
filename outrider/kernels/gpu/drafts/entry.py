"""Stores the drafts of each drafter in the batch rows, in one launch per drafter. Invalid counts and token ids are
rejected here, so the rows contain only drafts that a step can verify.

`kernels.step.store_drafts` is the specification, integer for integer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from outrider.core import NULL_ROW
from outrider.kernels.gpu.common import next_power_of_two, require, require_tensor
from outrider.kernels.gpu.launch.triton_kernel import kernel
from outrider.kernels.step import FAULT, FAULT_VALUE, LEVELS, NUM_COUNTS, PROPOSED, Proposal

_NULL_ROW = tl.constexpr(NULL_ROW)
_PROPOSED, _FAULT = tl.constexpr(PROPOSED), tl.constexpr(FAULT)
_FAULT_VALUE, _LEVELS = tl.constexpr(FAULT_VALUE), tl.constexpr(LEVELS)


@triton.jit
def _check_proposal(tokens, count, index, num_wanted, vocab_size):
    """Return (fault, wrong value). The fault is 0 if the proposal is valid, 1 for a count out of range, 2 for a token
    id outside of the vocabulary."""
    is_count = (count >= 0) & (count <= num_wanted)
    is_wrong = (index < count) & (index < num_wanted) & ((tokens < 0) | (tokens >= vocab_size))
    has_wrong = is_count & (tl.max(is_wrong.to(tl.int32), axis=0) > 0)
    first = tl.min(tl.where(is_wrong, index, num_wanted), axis=0)
    token = tl.sum(tl.where(index == first, tokens, 0), axis=0)
    return tl.where(is_count, tl.where(has_wrong, 2, 0), 1), tl.where(has_wrong, token, count)


_VARYING = ["proposal", "num_wanted", "vocab_size"]
_SLICES = ["rows", "offered", "offered_levels", "goes_on", "counts"]


@kernel(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_SLICES)
def _store_kernel(
    rows, tokens, offered, offered_levels, goes_on, is_on, drafts, num_drafts, levels, counts, proposal, num_wanted,
    vocab_size, request_stride, index_stride, draft_stride, FIRST: tl.constexpr, HAS_LEVELS: tl.constexpr,
    FILLS: tl.constexpr, DRAFTS: tl.constexpr, COUNTS: tl.constexpr,
):
    """Each program, of one warp, stores the drafts of one request, unless an earlier launch has stored some for it."""
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + request)
    out = counts + request * COUNTS
    goes_on = tl.load(goes_on + request) != 0
    count = tl.load(offered + request)
    index = tl.arange(0, DRAFTS).to(tl.int64)
    is_column = index < num_wanted
    token = tl.load(tokens + request * request_stride + index * index_stride, mask=is_column, other=0)
    is_asked = goes_on & (tl.load(is_on + proposal) > 0)
    wrong, value = _check_proposal(token, count, index, num_wanted, vocab_size)
    is_fault = is_asked & (wrong > 0)
    is_taken = is_asked & (wrong == 0)
    if not FIRST:
        stored = tl.load(out + _PROPOSED)
        is_fault = is_fault & (tl.load(out + _FAULT) == 0)
        is_taken = is_taken & (stored == 0)
    count = tl.where(is_taken, count, 0)
    level = tl.zeros_like(count)
    if HAS_LEVELS:
        level = tl.where(count > 0, tl.load(offered_levels + request), 0)
    token = tl.where(index < count, token, 0)
    writes = is_column & (row != _NULL_ROW)
    if FIRST:
        tl.store(out + _FAULT, tl.where(is_fault, wrong + 2 * proposal, 0).to(tl.int64))
        tl.store(out + _FAULT_VALUE, tl.where(is_fault, value, 0))
    else:
        tl.store(out + _FAULT, (wrong + 2 * proposal).to(tl.int64), mask=is_fault)
        tl.store(out + _FAULT_VALUE, value, mask=is_fault)
        level = tl.where(is_taken, level, tl.load(out + _LEVELS))
        count = tl.where(is_taken, count, stored)
        writes = writes & is_taken
    if FILLS:
        count = tl.where(goes_on, num_wanted, 0).to(tl.int64)
    tl.store(drafts + row * draft_stride + index, token, mask=writes)
    tl.store(num_drafts + row, count, mask=row != _NULL_ROW)
    tl.store(levels + row, level, mask=row != _NULL_ROW)
    tl.store(out + _PROPOSED, count)
    tl.store(out + _LEVELS, level)


def store_drafts(
    rows: torch.Tensor, proposals: Sequence[Proposal], goes_on: torch.Tensor, is_on: torch.Tensor, *, vocab_size: int,
    fills: bool, drafts: torch.Tensor, num_drafts: torch.Tensor, levels: torch.Tensor, counts: torch.Tensor,
) -> None:
    """Store each request's drafts in its batch row; see `kernels.step.store_drafts` for the arguments. The null row,
    which padded requests use, keeps its drafts."""
    name, device, int64, (requests,) = "store_drafts", rows.device, (torch.int64,), rows.shape
    num_wanted = proposals[0].tokens.shape[1]
    require_tensor(name, "rows", rows, (requests,), device, int64)
    for tokens, offered, own_levels in proposals:
        require_tensor(name, "tokens", tokens, (requests, num_wanted), device, int64, 0)
        require_tensor(name, "counts of drafts", offered, (requests,), device, int64)
        if own_levels is not None:
            require_tensor(name, "levels of drafts", own_levels, (requests,), device, int64)
    require_tensor(name, "goes_on", goes_on, (requests,), device, (torch.bool,))
    require_tensor(name, "is_on", is_on, (len(proposals),), device, int64)
    require_tensor(name, "drafts", drafts, (None, None), device, int64)
    require_tensor(name, "num_drafts", num_drafts, (drafts.shape[0],), device, int64)
    require_tensor(name, "levels", levels, (drafts.shape[0],), device, int64)
    require_tensor(name, "counts", counts, (requests, NUM_COUNTS), device, int64, 2)
    require(num_wanted <= drafts.shape[1], name, "tokens", f"has {num_wanted} columns, more than the rows")
    for index, (tokens, offered, own_levels) in enumerate(proposals if requests else ()):
        _store_kernel[(requests,)](
            rows, tokens, offered, offered if own_levels is None else own_levels, goes_on, is_on, drafts, num_drafts,
            levels, counts, index, num_wanted, vocab_size, tokens.stride(0), tokens.stride(1), drafts.stride(0),
            FIRST=index == 0, HAS_LEVELS=own_levels is not None, FILLS=fills and index == len(proposals) - 1,
            DRAFTS=next_power_of_two(drafts.shape[1]), COUNTS=NUM_COUNTS, num_warps=1,
        )
