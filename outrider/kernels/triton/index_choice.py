"""The best top-k positions of each token row, by scores that `index_scores` left, without a sort.

The bins say in which of them the last chosen score lies. One pass over the scores lists the positions in that bin, the
candidates; then the least score that is still chosen, and the last position chosen with it, are searched among them. A
second pass writes the chosen positions in their order. Both passes are divided into segments of a token row, so a few
long contexts use the whole card. No result depends on the order in which programs run.
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

MAX_SCORES = 1 << 26  # scores, and candidates, that exist at a time
SEGMENT = 1024  # positions
CANDIDATES = 2048  # that a program keeps in registers
_GROUPS = tl.constexpr(64)  # of bins
MAX_POSITIONS = 1 << 22
_NONE = tl.constexpr(NOT_CHOSEN)
assert BINS + 1 <= NUM_COUNTERS
_INTS = ["first", "stop", "chosen"]
_VARYING = ["num_splits", "top_k", "num_segments"]


@triton.jit
def _last_bin(bins, top_k, COUNTS: tl.constexpr):
    """(the bin of the top_k-th best score, how many of the best lie in it), by groups of bins first."""
    SIZE: tl.constexpr = COUNTS // _GROUPS
    group, member = tl.arange(0, _GROUPS), tl.arange(0, SIZE)
    in_group = tl.sum(tl.load(bins + group[:, None] * SIZE + member[None, :]), axis=1)
    upwards = tl.sum(tl.where(group[None, :] >= group[:, None], in_group[None, :], 0), axis=1)
    own = tl.max(tl.where(upwards >= top_k, group, 0), axis=0)
    missing = top_k - tl.sum(tl.where(group > own, in_group, 0), axis=0)
    count = tl.load(bins + own * SIZE + member)
    upwards = tl.sum(tl.where(member[None, :] >= member[:, None], count[None, :], 0), axis=1)
    last = tl.max(tl.where(upwards >= missing, member, 0), axis=0)
    return own * SIZE + last, missing - tl.sum(tl.where(member > last, count, 0), axis=0)


@kernel(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_INTS)
def _candidates_kernel(
    first, stop, scores, bins, candidates, num_candidates, num_missing, num_above, scores_stride, num_splits, top_k,
    num_segments,
    COUNTS: tl.constexpr, SEG: tl.constexpr, PDL: tl.constexpr,
):
    """Finds the bin of the last chosen score. Lists the positions in it, and counts those above it by segment."""
    release_dependents(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    low = tl.load(first + row).to(tl.int32)
    high = tl.load(stop + row).to(tl.int32)
    if high - low > top_k:
        last_bin, missing = _last_bin(bins + row * COUNTS, top_k, COUNTS)
        if tl.program_id(1) == 0:
            tl.store(num_missing + row, missing)
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
def _load_candidates(candidates, scores, start, count, SIZE: tl.constexpr):
    """(position, ordered score, whether there is one) of candidates [start, start + SIZE)."""
    index = start + tl.arange(0, SIZE)
    exists = index < count
    position = tl.load(candidates + index, mask=exists, other=0)
    return position, ordered(tl.load(scores + position, mask=exists, other=0.0)), exists


@triton.jit
def _is_chosen(order, position, least, last_place):
    """Whether a score is among the best: above the least one, or equal to it and no further than its last place."""
    return (order > least) | ((order == least) & (position <= last_place))


@triton.jit
def _search_in_registers(position, order, exists, missing):
    """(least chosen score, last position that is chosen with it) of candidates, of which `missing` are chosen."""
    high = tl.max(tl.where(exists, order, -2147483648), axis=0)
    low = tl.min(tl.where(exists, order, 2147483647), axis=0)
    while low < high:  # a bin is narrow: no sum overflows
        middle = low + (high - low + 1) // 2
        is_enough = tl.sum((exists & (order >= middle)).to(tl.int32), axis=0) >= missing
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle - 1)
    is_tied = exists & (order == low)
    missing -= tl.sum((exists & (order > low)).to(tl.int32), axis=0)
    first = tl.min(tl.where(is_tied, position, 2147483647), axis=0)
    last = tl.max(tl.where(is_tied, position, 0), axis=0)
    if tl.sum(is_tied.to(tl.int32), axis=0) > missing:
        while first < last:
            middle = first + (last - first) // 2
            is_enough = tl.sum((is_tied & (position <= middle)).to(tl.int32), axis=0) >= missing
            last = tl.where(is_enough, middle, last)
            first = tl.where(is_enough, first, middle + 1)
    return low, last


@triton.jit
def _count_chosen(candidates, scores, count, least, last_place, before, SIZE: tl.constexpr):
    """How many candidates at positions below `before` are chosen."""
    total = 0
    for start in range(0, count, SIZE):
        position, order, exists = _load_candidates(candidates, scores, start, count, SIZE)
        is_own = exists & _is_chosen(order, position, least, last_place) & (position < before)
        total += tl.sum(is_own.to(tl.int32), axis=0)
    return total


@triton.jit
def _search_in_memory(candidates, scores, count, missing, end, SIZE: tl.constexpr):
    """Like `_search_in_registers`, for more candidates than fit there; all positions are below `end`."""
    low, high = 2147483647, -2147483647
    for start in range(0, count, SIZE):
        position, order, exists = _load_candidates(candidates, scores, start, count, SIZE)
        high = tl.maximum(high, tl.max(tl.where(exists, order, -2147483647), axis=0))
        low = tl.minimum(low, tl.min(tl.where(exists, order, 2147483647), axis=0))
    while low < high:
        middle = low + (high - low + 1) // 2
        is_enough = _count_chosen(candidates, scores, count, middle, end, end, SIZE) >= missing
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle - 1)
    first, last = 0, end - 1
    while first < last:
        middle = first + (last - first) // 2
        is_enough = _count_chosen(candidates, scores, count, low, middle, end, SIZE) >= missing
        last = tl.where(is_enough, middle, last)
        first = tl.where(is_enough, first, middle + 1)
    return low, last


@kernel(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_INTS)
def _choice_kernel(
    first, stop, scores, candidates, num_candidates, num_missing, num_above, chosen, scores_stride, chosen_stride,
    num_splits, top_k, num_segments,
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
        missing = tl.load(num_missing + row)
        at, order, exists = _load_candidates(listed, own, 0, count, SIZE)
        if count <= SIZE:
            least, last_place = _search_in_registers(at, order, exists, missing)
        else:
            least, last_place = _search_in_memory(listed, own, count, missing, high, SIZE)
        number = tl.arange(0, SEGMENTS)
        is_there = (number >= low // SEG) & (number < tl.cdiv(high, SEG))
        above = tl.load(num_above + row * num_segments + number, mask=is_there, other=0)
        for segment in range(low // SEG + tl.program_id(1), tl.cdiv(high, SEG), num_splits):
            before = tl.sum(tl.where(number < segment, above, 0), axis=0)
            if count <= SIZE:
                is_before = exists & _is_chosen(order, at, least, last_place) & (at < segment * SEG)
                before += tl.sum(is_before.to(tl.int32), axis=0)
            else:
                before += _count_chosen(listed, own, count, least, last_place, segment * SEG, SIZE)
            position = segment * SEG + tl.arange(0, SEG)
            visible = (position >= low) & (position < high)
            # Scores above the last bin are above the least one, too.
            own_order = ordered(tl.load(own + position, mask=visible, other=0.0))
            is_chosen = visible & _is_chosen(own_order, position, least, last_place)
            place = before + tl.cumsum(is_chosen.to(tl.int32), axis=0) - 1
            tl.store(to + place, position, mask=is_chosen & (place < top_k))


def choose_positions(
    q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, contexts: TokenContexts, chosen: torch.Tensor,
    scales: torch.Tensor | None = None, counters: torch.Tensor | None = None, *, config: ScoreConfig | None = None,
    segment: int = SEGMENT, in_registers: int = CANDIDATES, num_splits: int | None = None, pdl: bool | None = None,
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
    num_segments = cdiv(num_keys, segment)
    device, int32 = q.device, torch.int32
    scores = torch.empty(step, num_keys, dtype=torch.float32, device=device)
    candidates = torch.empty(step, num_keys, dtype=int32, device=device)
    found = torch.empty(1 + num_segments, step, dtype=int32, device=device)
    for begin in range(0, num_tokens, step):
        rows = slice(begin, min(begin + step, num_tokens))
        own, count = contexts.cut(rows), rows.stop - rows.start
        if counters is None or step < num_tokens:
            counters = torch.zeros(count, NUM_COUNTERS, dtype=int32, device=device)
        counted = counters.view(-1)
        bins, num_candidates = counted[: count * BINS], counted[count * BINS :]
        index_scores(q[rows], weights[rows], keys, own, top_k, scores, bins, scales, config=config,
                     num_splits=num_splits, pdl=pdl)
        splits = num_splits or max(1, min(num_segments, 8 * num_sms(device) // count))
        common = (num_candidates, found[0], found[1:])
        _candidates_kernel[(count, splits)](
            own.first, own.stop, scores, bins, candidates, *common, scores.stride(0), splits, top_k, num_segments,
            COUNTS=BINS, SEG=segment, PDL=pdl, num_warps=4, **pdl_options(pdl),
        )
        _choice_kernel[(count, splits)](
            own.first, own.stop, scores, candidates, *common, chosen[rows], scores.stride(0), chosen.stride(0), splits,
            top_k, num_segments, SEG=segment, SEGMENTS=next_power_of_two(num_segments), SIZE=in_registers, PDL=pdl,
            num_warps=2, **pdl_options(pdl),
        )


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
