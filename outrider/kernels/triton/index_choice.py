"""The best top-k positions of each token row, by scores that `index_scores` left, without a sort.

The least score that is still chosen is found by three levels of bins. Those of the first level, which `index_scores`
counted, are the leading bits of a score; one pass over the scores counts, within the bin where the best end, the bits
that follow, and another pass the last bits. That pass also counts by segments of a token row, so that the fourth kernel
knows where each segment's chosen positions begin, and writes them in their order. However scores are distributed, also
if all of them are equal, each kernel reads them once. All passes are divided into segments, so a few long contexts use
the whole card. No result depends on the order in which programs run.
"""

from __future__ import annotations

import torch

import triton
import triton.language as tl
from outrider.kernels.latent import NOT_CHOSEN, NUM_COUNTERS, TokenContexts
from outrider.kernels.triton.common import (
    FLOATS,
    cdiv,
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

MAX_SCORES = 1 << 26  # scores that exist at a time
SEGMENT = 1024  # positions; twice as many where there would be more than two for each multiprocessor
MIDDLE_BINS, LAST_BINS = 4096, 256  # of the second and the third level
_MIDDLE_BITS, _LAST_BITS = tl.constexpr(12), tl.constexpr(8)
# Numbers of a token row that a kernel leaves for the next: the bin of the last chosen score and how many of the best
# lie in it, then the leading and middle bits of that score and how many of the best have them.
_FOUND = tl.constexpr(4)
_MOST_GROUPS = tl.constexpr(64)  # of bins
MAX_POSITIONS = 1 << 22
_NONE = tl.constexpr(NOT_CHOSEN)
assert BINS * MIDDLE_BINS * LAST_BINS == 1 << 32 and BINS + MIDDLE_BINS + LAST_BINS <= NUM_COUNTERS
_INTS = ["first", "stop", "chosen"]
_VARYING = ["num_splits", "top_k", "num_segments"]


@triton.jit
def _last_bin(bins, missing, COUNTS: tl.constexpr):
    """(the bin in which the best `missing` scores end, how many of them lie in it), by groups of bins first."""
    GROUPS: tl.constexpr = _MOST_GROUPS if COUNTS >= _MOST_GROUPS * _MOST_GROUPS else 16
    SIZE: tl.constexpr = COUNTS // GROUPS
    group, member = tl.arange(0, GROUPS), tl.arange(0, SIZE)
    in_group = tl.sum(tl.load(bins + group[:, None] * SIZE + member[None, :]), axis=1)
    own = tl.max(tl.where(tl.cumsum(in_group, axis=0, reverse=True) >= missing, group, 0), axis=0)
    missing -= tl.sum(tl.where(group > own, in_group, 0), axis=0)
    count = tl.load(bins + own * SIZE + member)
    last = tl.max(tl.where(tl.cumsum(count, axis=0, reverse=True) >= missing, member, 0), axis=0)
    return own * SIZE + last, missing - tl.sum(tl.where(member > last, count, 0), axis=0)


@triton.jit
def _load_segment(scores, segment, low, high, SEG: tl.constexpr):
    """(positions, whether they are visible, ordered scores) of a segment of a token row. Kernels ask for the next one
    ahead of time: loads are not moved across sums."""
    position = segment * SEG + tl.arange(0, SEG)
    visible = (position >= low) & (position < high)
    return position, visible, ordered(tl.load(scores + position, mask=visible, other=0.0))


@kernel(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_INTS)
def _middle_bins_kernel(
    first, stop, scores, bins, middle_bins, found, scores_stride, num_splits, top_k,
    COUNTS: tl.constexpr, MIDDLE: tl.constexpr, SEG: tl.constexpr, PDL: tl.constexpr,
):
    """Finds the bin of the last chosen score, and counts the scores in it by their middle bits."""
    release_dependents(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    low = tl.load(first + row).to(tl.int32)
    high = tl.load(stop + row).to(tl.int32)
    if high - low > top_k:
        own, begin = scores + row * scores_stride, low // SEG + tl.program_id(1)
        position, visible, order = _load_segment(own, begin, low, high, SEG)
        last, missing = _last_bin(bins + row * COUNTS, top_k, COUNTS)
        if tl.program_id(1) == 0:
            tl.store(found + row * _FOUND, last)
            tl.store(found + row * _FOUND + 1, missing)
        for segment in range(begin, tl.cdiv(high, SEG), num_splits):
            middle = (order >> _LAST_BITS) & (MIDDLE - 1)
            middle = tl.where(visible & (bin_of(order) == last), middle, -1)
            # Where scores are equal, one bin would be counted up again and again: the highest is counted here.
            highest = tl.max(middle, axis=0)
            if highest >= 0:
                to = middle_bins + row * MIDDLE
                tl.atomic_add(to + highest, tl.sum((middle == highest).to(tl.int32), axis=0), sem="relaxed")
                tl.atomic_add(to + middle, 1, mask=(middle >= 0) & (middle != highest), sem="relaxed")
            position, visible, order = _load_segment(own, segment + num_splits, low, high, SEG)


@kernel(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_INTS)
def _last_bins_kernel(
    first, stop, scores, middle_bins, last_bins, found, num_above, num_inside, from_bin, scores_stride, num_splits,
    top_k, num_segments,
    COUNTS: tl.constexpr, MIDDLE: tl.constexpr, LAST: tl.constexpr, SEG: tl.constexpr, PDL: tl.constexpr,
):
    """Finds the leading and middle bits of the last chosen score. Counts by segment the scores above all that have
    them, and those that have them: by their last bits, and for each of these how many are not below."""
    release_dependents(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    low = tl.load(first + row).to(tl.int32)
    high = tl.load(stop + row).to(tl.int32)
    if high - low > top_k:
        own, begin = scores + row * scores_stride, low // SEG + tl.program_id(1)
        position, visible, order = _load_segment(own, begin, low, high, SEG)
        leading = tl.load(found + row * _FOUND)
        middle, missing = _last_bin(middle_bins + row * MIDDLE, tl.load(found + row * _FOUND + 1), MIDDLE)
        shared = ((leading - COUNTS // 2) << _MIDDLE_BITS) | middle
        if tl.program_id(1) == 0:
            tl.store(found + row * _FOUND + 2, shared)
            tl.store(found + row * _FOUND + 3, missing)
        for segment in range(begin, tl.cdiv(high, SEG), num_splits):
            at = row * num_segments + segment
            tl.store(num_above + at, tl.sum((visible & ((order >> _LAST_BITS) > shared)).to(tl.int32), axis=0))
            is_inside = visible & ((order >> _LAST_BITS) == shared)
            inside = tl.sum(is_inside.to(tl.int32), axis=0)
            tl.store(num_inside + at, inside)
            if inside > 0:
                last = tl.arange(0, LAST)
                count = tl.histogram(order & (LAST - 1), LAST, mask=is_inside)
                tl.atomic_add(last_bins + row * LAST + last, count, mask=count > 0, sem="relaxed")
                tl.store(from_bin + at * LAST + last, tl.cumsum(count, axis=0, reverse=True).to(tl.int16))
            position, visible, order = _load_segment(own, segment + num_splits, low, high, SEG)


@kernel(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_INTS)
def _choice_kernel(
    first, stop, scores, last_bins, found, num_above, num_inside, from_bin, chosen, scores_stride, chosen_stride,
    num_splits, top_k, num_segments,
    LAST: tl.constexpr, SEG: tl.constexpr, SEGMENTS: tl.constexpr, PDL: tl.constexpr,
):
    """Writes the chosen positions: scores above the least one, and as many of those equal to it as are missing."""
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
        own, begin = scores + row * scores_stride, low // SEG + tl.program_id(1)
        position, visible, order = _load_segment(own, begin, low, high, SEG)
        number = tl.arange(0, SEGMENTS)
        at = row * num_segments + number
        is_there = (number >= low // SEG) & (number < tl.cdiv(high, SEG))
        above = tl.load(num_above + at, mask=is_there, other=0)
        inside = is_there & (tl.load(num_inside + at, mask=is_there, other=0) > 0)
        shared = tl.load(found + row * _FOUND + 2)
        last, missing = _last_bin(last_bins + row * LAST, tl.load(found + row * _FOUND + 3), LAST)
        least = (shared << _LAST_BITS) | last
        reached = tl.load(from_bin + at * LAST + last, mask=inside, other=0).to(tl.int32)
        passed = tl.load(from_bin + at * LAST + last + 1, mask=inside & (last + 1 < LAST), other=0).to(tl.int32)
        for segment in range(begin, tl.cdiv(high, SEG), num_splits):
            above_before = tl.sum(tl.where(number < segment, above + passed, 0), axis=0)
            equal_before = tl.sum(tl.where(number < segment, reached - passed, 0), axis=0)
            is_equal = visible & (order == least)
            is_equal = is_equal & (equal_before + tl.cumsum(is_equal.to(tl.int32), axis=0) <= missing)
            is_chosen = is_equal | (visible & (order > least))
            place = above_before + tl.minimum(equal_before, missing) + tl.cumsum(is_chosen.to(tl.int32), axis=0) - 1
            tl.store(to + place, position, mask=is_chosen & (place < top_k))
            position, visible, order = _load_segment(own, segment + num_splits, low, high, SEG)


def choose_positions(
    q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, contexts: TokenContexts, chosen: torch.Tensor,
    scales: torch.Tensor | None = None, counters: torch.Tensor | None = None, *, config: ScoreConfig | None = None,
    segment: int | None = None, num_splits: int | None = None, pdl: bool | None = None,
) -> None:
    """See `kernels.latent.choose_positions`. Scores exist for as many token rows as MAX_SCORES allows at a time."""
    pdl = uses_pdl(q.device) if pdl is None else pdl
    num_tokens, num_keys, top_k = check_choice(q, weights, keys, contexts, chosen, scales)
    if counters is not None:
        require_tensor("choose_positions", "counters", counters, (num_tokens, NUM_COUNTERS), q.device, (torch.int32,),
                       inner_contiguous=2)
    if num_tokens == 0:
        return
    step = max(1, min(num_tokens, MAX_SCORES // num_keys))
    scores = torch.empty(step, num_keys, dtype=torch.float32, device=q.device)
    for begin in range(0, num_tokens, step):
        rows = slice(begin, min(begin + step, num_tokens))
        own, count = contexts.cut(rows), rows.stop - rows.start
        if counters is None or step < num_tokens:
            counters = torch.zeros(count, NUM_COUNTERS, dtype=torch.int32, device=q.device)
        counted = counters.view(-1)[: count * (BINS + MIDDLE_BINS + LAST_BINS)]
        bins = counted.split([count * BINS, count * MIDDLE_BINS, count * LAST_BINS])
        index_scores(q[rows], weights[rows], keys, own, top_k, scores, bins[0], scales, config=config,
                     num_splits=num_splits, pdl=pdl)
        choose_by_scores(scores, bins, own, chosen[rows], segment, num_splits, pdl)


def choose_by_scores(scores: torch.Tensor, bins: tuple[torch.Tensor, ...], contexts: TokenContexts,
                     chosen: torch.Tensor, segment: int | None, num_splits: int | None, pdl: bool) -> None:  # fmt: skip
    """Writes the choice. bins: counters of the three levels for each token row; those of the first hold the scores'
    numbers, the others are zeros."""
    (count, top_k), device = chosen.shape, scores.device
    if segment is None:
        segment = SEGMENT if count * cdiv(scores.shape[1], SEGMENT) <= 2 * num_sms(device) else 2 * SEGMENT
    num_segments = cdiv(scores.shape[1], segment)
    splits = num_splits or max(1, min(num_segments, 8 * num_sms(device) // count))
    found = torch.empty(count, _FOUND.value, dtype=torch.int32, device=device)
    by_segment = torch.empty(2, count, num_segments, dtype=torch.int32, device=device)
    from_bin = torch.empty(count, num_segments, LAST_BINS, dtype=torch.int16, device=device)
    grid, seen = (count, splits), (contexts.first, contexts.stop, scores)
    levels, options = {"MIDDLE": MIDDLE_BINS, "SEG": segment, "PDL": pdl}, {"num_warps": 4, **pdl_options(pdl)}
    _middle_bins_kernel[grid](*seen, bins[0], bins[1], found, scores.stride(0), splits, top_k, COUNTS=BINS, **levels,
                              **options)
    _last_bins_kernel[grid](*seen, bins[1], bins[2], found, *by_segment, from_bin, scores.stride(0), splits, top_k,
                            num_segments, COUNTS=BINS, LAST=LAST_BINS, **levels, **options)
    _choice_kernel[grid](*seen, bins[2], found, *by_segment, from_bin, chosen, scores.stride(0), chosen.stride(0),
                         splits, top_k, num_segments, LAST=LAST_BINS, SEG=segment,
                         SEGMENTS=next_power_of_two(num_segments), PDL=pdl, **options)


def check_choice(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, contexts: TokenContexts,
                 chosen: torch.Tensor, scales: torch.Tensor | None) -> tuple[int, int, int]:  # fmt: skip
    """(token rows, positions that the page table has room for, top-k)."""
    name, device, integers = "choose_positions", q.device, (torch.int32, torch.int64)
    require_tensor(name, "q", q, (None, None, None), device, FLOATS)
    num_tokens, num_heads, head_dim = q.shape
    require_tensor(name, "weights", weights, (num_tokens, num_heads), device, FLOATS)
    stored = q.dtype if scales is None else torch.float8_e4m3fn
    require_tensor(name, "keys", keys, (None, None, head_dim), device, (stored,))
    if scales is not None:
        require_tensor(name, "scales", scales, (*keys.shape[:2], 1), device, (torch.float32,), inner_contiguous=2)
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
