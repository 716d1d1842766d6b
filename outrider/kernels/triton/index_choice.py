"""The best top-k positions of each token row, by scores that `index_scores` left, without a sort.

The bins say in which of them the last chosen score lies. One pass over the scores lists the positions in that bin, the
candidates; then the smallest pair (score, lower position first) that is still chosen is searched among them, and a
second pass writes the chosen positions in their order. Both passes are divided into segments of a token row, so a few
long contexts use the whole card. No result depends on the order in which programs run.
"""

from __future__ import annotations

import torch

import triton
import triton.language as tl
from outrider.kernels.latent import NOT_CHOSEN, TokenContexts
from outrider.kernels.triton.common import (
    FLOATS,
    next_power_of_two,
    num_sms,
    pdl_options,
    release_dependents,
    require,
    require_tensor,
    uses_pdl,
    wait_for_inputs,
)
from outrider.kernels.triton.index_scores import BINS, ScoreConfig, bin_of, index_scores, ordered
from outrider.kernels.triton.launch import kernel

MAX_SCORES = 1 << 26  # scores, and candidates, that exist at a time
SEGMENT = 4096  # positions
CANDIDATES = 2048  # that a program keeps in registers
MAX_POSITIONS = 1 << 22
_PLACES = tl.constexpr(MAX_POSITIONS)
_NONE = tl.constexpr(NOT_CHOSEN)
_LOWEST = tl.constexpr(-(1 << 62))
_INTS = ["first", "stop", "chosen"]
_VARYING = ["num_splits", "top_k", "num_segments"]


@triton.jit
def _rank_key(score, position):
    """Integers in the order of (score, lower position first)."""
    return ordered(score).to(tl.int64) * _PLACES + (_PLACES - 1 - position)


@kernel(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_INTS)
def _candidates_kernel(
    first, stop, scores, bins, candidates, num_candidates, threshold_bin, num_missing, num_above, scores_stride,
    num_splits, top_k, num_segments,
    COUNTS: tl.constexpr, SEG: tl.constexpr, PDL: tl.constexpr,
):
    """Finds the bin of the last chosen score. Lists the positions in it, and counts those above it by segment."""
    release_dependents(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    low = tl.load(first + row).to(tl.int32)
    high = tl.load(stop + row).to(tl.int32)
    if high - low > top_k:
        index = tl.arange(0, COUNTS)
        count = tl.load(bins + row * COUNTS + index)
        at_least = tl.cumsum(count, axis=0, reverse=True)
        last_bin = tl.max(tl.where(at_least >= top_k, index, -1), axis=0)
        if tl.program_id(1) == 0:
            above = tl.sum(tl.where(index > last_bin, count, 0), axis=0)
            tl.store(threshold_bin + row, last_bin)
            tl.store(num_missing + row, top_k - above)
        for segment in range(low // SEG + tl.program_id(1), tl.cdiv(high, SEG), num_splits):
            position = segment * SEG + tl.arange(0, SEG)
            visible = (position >= low) & (position < high)
            own = bin_of(ordered(tl.load(scores + row * scores_stride + position, mask=visible, other=0.0)))
            own_above = tl.sum((visible & (own > last_bin)).to(tl.int32), axis=0)
            tl.store(num_above + row * num_segments + segment, own_above)
            is_candidate = visible & (own == last_bin)
            listed = tl.cumsum(is_candidate.to(tl.int32), axis=0)
            begin = tl.atomic_add(num_candidates + row, tl.max(listed, axis=0), sem="relaxed")
            tl.store(candidates + row * scores_stride + begin + listed - 1, position, mask=is_candidate)


@triton.jit
def _load_keys(candidates, scores, start, count, SIZE: tl.constexpr):
    """Rank keys of candidates [start, start + SIZE); those past the last are lower than all others."""
    index = start + tl.arange(0, SIZE)
    position = tl.load(candidates + index, mask=index < count, other=0)
    score = tl.load(scores + position, mask=index < count, other=0.0)
    return tl.where(index < count, _rank_key(score, position), _LOWEST), position


@triton.jit
def _search_in_registers(keys, num_missing):
    """The num_missing-th largest of distinct keys."""
    high = tl.max(keys, axis=0)
    low = tl.min(tl.where(keys == _LOWEST, high, keys), axis=0)
    while low < high:
        middle = low + (high - low + 1) // 2
        is_enough = tl.sum((keys >= middle).to(tl.int32), axis=0) >= num_missing
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle - 1)
    return low


@triton.jit
def _count_keys(candidates, scores, count, least, before, SIZE: tl.constexpr):
    """How many candidates at positions below `before` have keys of at least `least`."""
    total = 0
    for start in range(0, count, SIZE):
        keys, position = _load_keys(candidates, scores, start, count, SIZE)
        total += tl.sum(((keys >= least) & (position < before)).to(tl.int32), axis=0)
    return total


@triton.jit
def _search_in_memory(candidates, scores, count, num_missing, SIZE: tl.constexpr):
    """Like `_search_in_registers`, for more candidates than fit there."""
    keys, _ = _load_keys(candidates, scores, 0, count, SIZE)
    high = tl.max(keys, axis=0)
    low = tl.min(keys, axis=0)
    for start in range(SIZE, count, SIZE):
        keys, _ = _load_keys(candidates, scores, start, count, SIZE)
        high = tl.maximum(high, tl.max(keys, axis=0))
        low = tl.minimum(low, tl.min(tl.where(keys == _LOWEST, high, keys), axis=0))
    while low < high:
        middle = low + (high - low + 1) // 2
        is_enough = _count_keys(candidates, scores, count, middle, _PLACES, SIZE) >= num_missing
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle - 1)
    return low


@kernel(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_INTS)
def _choice_kernel(
    first, stop, scores, candidates, num_candidates, threshold_bin, num_missing, num_above, chosen, scores_stride,
    chosen_stride, num_splits, top_k, num_segments,
    SEG: tl.constexpr, SEGMENTS: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):
    release_dependents(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    low = tl.load(first + row).to(tl.int32)
    high = tl.load(stop + row).to(tl.int32)
    to = chosen + row * chosen_stride
    if high - low <= top_k:  # all of them
        for start in range(tl.program_id(1) * SEG, top_k, num_splits * SEG):
            index = start + tl.arange(0, SEG)
            tl.store(to + index, tl.where(low + index < high, low + index, _NONE), mask=index < top_k)
    else:
        own, listed = scores + row * scores_stride, candidates + row * scores_stride
        count = tl.load(num_candidates + row)
        last_bin = tl.load(threshold_bin + row)
        keys, at = _load_keys(listed, own, 0, count, SIZE)
        if count <= SIZE:
            least = _search_in_registers(keys, tl.load(num_missing + row))
        else:
            least = _search_in_memory(listed, own, count, tl.load(num_missing + row), SIZE)
        number = tl.arange(0, SEGMENTS)
        is_there = (number >= low // SEG) & (number < tl.cdiv(high, SEG))
        above = tl.load(num_above + row * num_segments + number, mask=is_there, other=0)
        for segment in range(low // SEG + tl.program_id(1), tl.cdiv(high, SEG), num_splits):
            before = tl.sum(tl.where(number < segment, above, 0), axis=0)
            if count <= SIZE:
                before += tl.sum(((keys >= least) & (at < segment * SEG)).to(tl.int32), axis=0)
            else:
                before += _count_keys(listed, own, count, least, segment * SEG, SIZE)
            position = segment * SEG + tl.arange(0, SEG)
            visible = (position >= low) & (position < high)
            score = tl.load(own + position, mask=visible, other=0.0)
            bin_index = bin_of(ordered(score))
            is_chosen = (bin_index > last_bin) | ((bin_index == last_bin) & (_rank_key(score, position) >= least))
            is_chosen = visible & is_chosen
            place = before + tl.cumsum(is_chosen.to(tl.int32), axis=0) - 1
            tl.store(to + place, position, mask=is_chosen & (place < top_k))


def choose_positions(
    q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, contexts: TokenContexts, chosen: torch.Tensor, *,
    config: ScoreConfig | None = None, segment: int = SEGMENT, in_registers: int = CANDIDATES,
    num_splits: int | None = None, pdl: bool | None = None,
) -> None:
    """See `kernels.latent.choose_positions`. Scores exist for as many token rows as MAX_SCORES allows at a time."""
    pdl = uses_pdl(q.device) if pdl is None else pdl
    num_tokens, num_keys, top_k = _check(q, weights, keys, contexts, chosen)
    if num_tokens == 0:
        return
    step = max(1, min(num_tokens, MAX_SCORES // num_keys))
    num_segments = triton.cdiv(num_keys, segment)
    device, int32 = q.device, torch.int32
    scores = torch.empty(step, num_keys, dtype=torch.float32, device=device)
    candidates = torch.empty(step, num_keys, dtype=int32, device=device)
    found = torch.empty(2 + num_segments, step, dtype=int32, device=device)
    for begin in range(0, num_tokens, step):
        rows = slice(begin, min(begin + step, num_tokens))
        own, count = contexts.cut(rows), rows.stop - rows.start
        counted = torch.zeros(count * (BINS + 1), dtype=int32, device=device)
        bins, num_candidates = counted[: count * BINS], counted[count * BINS :]
        index_scores(q[rows], weights[rows], keys, own, top_k, scores, bins, config=config, num_splits=num_splits,
                     pdl=pdl)
        splits = num_splits or max(1, min(num_segments, 4 * num_sms(device) // count))
        common = (num_candidates, found[0], found[1], found[2:])
        _candidates_kernel[(count, splits)](
            own.first, own.stop, scores, bins, candidates, *common, scores.stride(0), splits, top_k, num_segments,
            COUNTS=BINS, SEG=segment, PDL=pdl, num_warps=8, **pdl_options(pdl),
        )
        _choice_kernel[(count, splits)](
            own.first, own.stop, scores, candidates, *common, chosen[rows], scores.stride(0), chosen.stride(0), splits,
            top_k, num_segments, SEG=segment, SEGMENTS=next_power_of_two(num_segments), SIZE=in_registers, PDL=pdl,
            num_warps=8, **pdl_options(pdl),
        )


def _check(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, contexts: TokenContexts,
           chosen: torch.Tensor) -> tuple[int, int, int]:  # fmt: skip
    """(token rows, positions that the page table has room for, top-k)."""
    name, device, integers = "choose_positions", q.device, (torch.int32, torch.int64)
    require_tensor(name, "q", q, (None, None, None), device, FLOATS)
    num_tokens, num_heads, head_dim = q.shape
    require_tensor(name, "weights", weights, (num_tokens, num_heads), device, FLOATS)
    require_tensor(name, "keys", keys, (None, None, head_dim), device, (q.dtype,))
    require_tensor(name, "page_table", contexts.page_table, (None, None), device, integers)
    for argument in ("request_of", "first", "stop"):
        require_tensor(name, argument, getattr(contexts, argument), (num_tokens,), device, integers)
    require_tensor(name, "chosen", chosen, (num_tokens, None), device, integers)
    page_tokens, top_k = keys.shape[1], chosen.shape[1]
    require(page_tokens & (page_tokens - 1) == 0, name, "keys", f"has {page_tokens} tokens per page, expected a power"
            " of two")
    num_keys = contexts.page_table.shape[1] * page_tokens
    require(top_k <= num_keys < MAX_POSITIONS, name, "chosen",
            f"has room for {top_k} of {num_keys} positions, expected at most as many, and fewer than {MAX_POSITIONS}")
    return num_tokens, num_keys, top_k
