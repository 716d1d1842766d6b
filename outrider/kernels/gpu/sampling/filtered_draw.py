"""Draws from edited logits with min-p, top-k and top-p, without a sort. `sample/filters.py` is the specification.

The token with the greatest score is drawn; a score is a scaled logit plus its noise.

    1. score     every span's best token; in rows with a top-k, candidates (`candidates.py`)
    2. pick      the best token of all spans, or the token of a row with candidates. Rows with a top-p get pivots:
                 the distances of the best token, of the best one among those nearer than it, and so on
    3. weigh     sum the weights within the pivots, which decide whether the pivots are kept; with many rows, nearly
    4. settle    if the best token is not kept, score spans again without the tokens that are as far as it, until a
                 token is found that is kept (`rejection.py`)

A top-p of 0.9 rejects one token in ten, whatever the shape of the row. A row that needs a pivot whose weight is
missing, or too near the limit, goes through 3 and 4 again, exactly. What is still undecided then is read again by one
program for each row, and so are rows with more candidates than there is room for (many equal logits).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from outrider.kernels import sampling_flags as flags
from outrider.kernels.gpu.common import (
    next_power_of_two,
    pdl_options,
    release_dependents,
    require_tensor,
    uses_pdl,
    wait_for_inputs,
)
from outrider.kernels.gpu.launch.triton_kernel import kernel
from outrider.kernels.gpu.sampling.candidates import (
    bound_of,
    draw_candidate,
    furthest_candidate,
    has_candidates,
    list_candidates,
)
from outrider.kernels.gpu.sampling.draw import (
    GROUP,
    QUADS,
    SLICES,
    TILE,
    Spans,
    greatest_of_spans,
    own_logits,
    shift_of,
)
from outrider.kernels.gpu.sampling.masses import PIVOTS, distance_of, furthest_kept, scaled_at, weights_within
from outrider.kernels.gpu.sampling.rejection import best_nearer, draw_by_rejection, is_weighed, token_distances
from outrider.kernels.gpu.sampling.scans import NO_ID, best_of, scan, scan_greedy

_TOP_P, _EDITED = tl.constexpr(flags.TOP_P), tl.constexpr(flags.EDITED)
_SEARCHED, _FILTERED = tl.constexpr(flags.SEARCHED), tl.constexpr(flags.FILTERED)

_ROOM = 8192  # candidates of one logit row
_SEARCH_TILE = 1024
_MANY_ROWS = 16
_WEIGH_WARPS, _REGISTERS = 4, 64  # more programs at a time: they wait for memory
_SUMS = 1 + PIVOTS


class FilterRows(NamedTuple):
    """The parameters of all rows that filters read; [rows]."""

    flags: torch.Tensor  # int64
    temperature: torch.Tensor  # float32
    top_k: torch.Tensor  # int64
    top_p: torch.Tensor  # float32
    min_p_floor: torch.Tensor  # float32: log of min_p, -inf where there is none
    seed: torch.Tensor  # int64
    sample_index: torch.Tensor  # int64
    num_logprobs: torch.Tensor  # int64; below 0: none


class Drawn(NamedTuple):
    tokens: torch.Tensor  # [logit rows] int64; 0 where bad
    bad: torch.Tensor  # [logit rows] bool
    # [logit rows] float32: what scaled logits reach if they are kept. Only in logit rows that ask for a filter and for
    # log-probabilities, and only if thresholds were asked for.
    thresholds: torch.Tensor


class _Scratch(NamedTuple):
    scores: torch.Tensor  # [logit rows, spans] float32: of every span's best token
    tokens: torch.Tensor  # [logit rows, spans] int32: that token
    pivots: torch.Tensor  # [logit rows, pivots] int32
    brackets: torch.Tensor  # [logit rows, 2] int32: greatest distance known to be kept, least known not to be
    is_pending: torch.Tensor  # [logit rows] int32: 1 where pivots wait to be weighed in another round
    sums: torch.Tensor  # [logit rows, spans, 1 + pivots] int64: weight of the span, and within every pivot
    num_candidates: torch.Tensor  # [logit rows] int32
    candidates: torch.Tensor  # [logit rows, room] float32: their scaled logits
    candidate_ids: torch.Tensor  # [logit rows, room] int32
    bounds: torch.Tensor  # [logit rows] int32: what candidates lie within, if a kernel of its own looks for it


@kernel(do_not_specialize=["num_spans"], do_not_specialize_on_alignment=SLICES)
def _bound_kernel(
    row, rows, span_greatest, group_greatest, scratch, num_groups, num_spans, SPANS: tl.constexpr, GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute, for each logit row with a top-k, how far below the greatest logit its candidates may lie (`bound_of`).

    One program for each row writes this distance to scratch.bounds, so that the many programs that list the row's
    candidates need not compute it again."""
    release_dependents(PDL)
    wait_for_inputs(PDL)
    at = tl.program_id(0).to(tl.int64)
    of = tl.load(row + at)
    top_k = tl.load(rows.top_k + of)
    if has_candidates(tl.load(rows.flags + of), top_k, num_groups):
        shift = shift_of(span_greatest + at * num_spans, num_spans, SPANS)
        bound = bound_of(group_greatest + at * num_groups, num_groups, top_k.to(tl.int32), shift,
                         tl.load(rows.temperature + of), GROUPS)
        tl.store(scratch.bounds + at, bound)


@kernel(do_not_specialize=["span"], do_not_specialize_on_alignment=SLICES)
def _score_filtered_kernel(
    logits, edited, row, rows, position, span_greatest, group_greatest, scratch, logit_stride, edited_stride, vocab,
    num_tiles, num_groups, span, BOUNDED: tl.constexpr, ROOM: tl.constexpr, QUADS: tl.constexpr, SPANS: tl.constexpr,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):
    """Find one span's best token, or list its candidates."""
    release_dependents(PDL)
    wait_for_inputs(PDL)
    at, num_spans = tl.program_id(1).to(tl.int64), tl.num_programs(0)
    first = tl.program_id(0) * span
    last = tl.minimum(first + span, num_tiles)
    of = tl.load(row + at)
    flag, temperature = tl.load(rows.flags + of), tl.load(rows.temperature + of)
    own = own_logits(logits, edited, at, logit_stride, edited_stride, flag)
    place = at * num_spans + tl.program_id(0)
    if temperature > 0:
        shift = shift_of(span_greatest + at * num_spans, num_spans, SPANS)
        floor, top_k = tl.load(rows.min_p_floor + of), tl.load(rows.top_k + of)
        if has_candidates(flag, top_k, num_groups):
            groups = group_greatest + at * num_groups
            if BOUNDED:
                bound = tl.load(scratch.bounds + at)
            else:
                bound = bound_of(groups, num_groups, top_k.to(tl.int32), shift, temperature, GROUPS)
            list_candidates(
                own, first, last, vocab, bound, shift, temperature, floor, groups, scratch.num_candidates + at,
                scratch.candidates + at * ROOM, scratch.candidate_ids + at * ROOM, ROOM, GROUP, 4 * QUADS,
            )
        else:
            top, chosen = scan(
                own, first, last, vocab, temperature, shift, floor, tl.load(rows.seed + of),
                tl.load(position + at).to(tl.uint32), tl.load(rows.sample_index + of).to(tl.uint32), True, QUADS,
            )
            tl.store(scratch.scores + place, top)
            tl.store(scratch.tokens + place, chosen)
    else:
        top, chosen = scan_greedy(own, first, last, vocab, 4 * QUADS)
        tl.store(scratch.scores + place, top)
        tl.store(scratch.tokens + place, chosen)


@triton.jit
def _is_listed(scratch, at, flag, top_k, num_groups, ROOM: tl.constexpr):
    """Whether a row is drawn from candidates: it has a list, and all candidates found room in it."""
    has_list = has_candidates(flag, top_k, num_groups)
    return has_list & (tl.load(scratch.num_candidates + at, mask=has_list, other=0) <= ROOM)


@kernel(do_not_specialize=["num_spans"], do_not_specialize_on_alignment=SLICES)
def _pick_filtered_kernel(
    logits, edited, row, rows, position, span_greatest, scratch, tokens, bad, thresholds, logit_stride, edited_stride,
    vocab, num_tiles, num_groups, num_spans, ROOM: tl.constexpr, LISTED: tl.constexpr, PIVOTS: tl.constexpr,
    SPANS: tl.constexpr, PDL: tl.constexpr,
):
    """Draw the token of a row with candidates. For other rows, take the best token of all spans, and store pivots if
    the row has to be weighed."""
    release_dependents(PDL)
    wait_for_inputs(PDL)
    at = tl.program_id(0).to(tl.int64)
    of = tl.load(row + at)
    flag, top_k = tl.load(rows.flags + of), tl.load(rows.top_k + of)
    floor, temperature = tl.load(rows.min_p_floor + of), tl.load(rows.temperature + of)
    # The greatest logits of greedy rows were looked for only where logits are edited.
    greatest = greatest_of_spans(span_greatest + at * num_spans, num_spans, SPANS)
    if _is_listed(scratch, at, flag, top_k, num_groups, ROOM):
        is_bad = tl.abs(greatest) == float("inf")
        chosen = tl.full([], 0, dtype=tl.int32)
        if not is_bad:
            values, ids = scratch.candidates + at * ROOM, scratch.candidate_ids + at * ROOM
            found = tl.load(scratch.num_candidates + at)
            furthest = furthest_candidate(flag, top_k, tl.load(rows.top_p + of), values, found, LISTED)
            word1, word2 = tl.load(position + at).to(tl.uint32), tl.load(rows.sample_index + of).to(tl.uint32)
            chosen = draw_candidate(furthest, values, ids, found, tl.load(rows.seed + of), word1, word2, LISTED)
            tl.store(thresholds + at, tl.maximum(floor, scaled_at(furthest)))
        tl.store(bad + at, is_bad)
        tl.store(tokens + at, chosen.to(tl.int64))
    elif not has_candidates(flag, top_k, num_groups):
        own = own_logits(logits, edited, at, logit_stride, edited_stride, flag)
        span = tl.arange(0, SPANS)
        score = tl.load(scratch.scores + at * num_spans + span, mask=span < num_spans, other=float("-inf"))
        token = tl.load(scratch.tokens + at * num_spans + span, mask=span < num_spans, other=NO_ID)
        _, chosen = best_of(score, token)
        logit = tl.load(own + chosen)
        is_bad = (tl.abs(logit) < float("inf")) == 0  # also where it is a NaN
        is_bad = is_bad | (((flag & _EDITED) != 0) & (tl.abs(greatest) == float("inf")))
        tl.store(bad + at, is_bad)
        tl.store(tokens + at, tl.where(is_bad, 0, chosen).to(tl.int64))
        if (flag & _FILTERED) != 0:
            tl.store(thresholds + at, floor)
        if is_weighed(flag, top_k, num_groups):
            shift = tl.where(tl.abs(greatest) < float("inf"), greatest, 0.0)
            distance = token_distances(own, token, shift, temperature, vocab)
            pivot = distance_of(tl.div_rn(logit - shift, temperature))
            for index in tl.static_range(PIVOTS):
                tl.store(scratch.pivots + at * PIVOTS + index, pivot)
                pivot = best_nearer(score, distance, pivot)


@kernel(do_not_specialize=["span"], do_not_specialize_on_alignment=SLICES)
def _weigh_kernel(
    logits, edited, row, rows, span_greatest, scratch, logit_stride, edited_stride, vocab, num_tiles, num_groups, span,
    FIRST: tl.constexpr, ABOUT: tl.constexpr, PIVOTS: tl.constexpr, SIZE: tl.constexpr, SPANS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add up one span's weight, in total and within each pivot. ABOUT: with a small error, which a later round may
    correct."""
    release_dependents(PDL)
    wait_for_inputs(PDL)
    at, num_spans = tl.program_id(1).to(tl.int64), tl.num_programs(0)
    of = tl.load(row + at)
    flag = tl.load(rows.flags + of)
    takes_part = is_weighed(flag, tl.load(rows.top_k + of), num_groups)
    if not FIRST:
        takes_part = takes_part & (tl.load(scratch.is_pending + at, mask=takes_part, other=0) != 0)
    if takes_part:
        own = own_logits(logits, edited, at, logit_stride, edited_stride, flag)
        shift = shift_of(span_greatest + at * num_spans, num_spans, SPANS)
        first, pivots = tl.program_id(0) * span, scratch.pivots + at * PIVOTS
        total, sum0, sum1, sum2, sum3 = weights_within(
            own, first, tl.minimum(first + span, num_tiles), vocab, shift, tl.load(rows.temperature + of),
            tl.load(rows.min_p_floor + of), (flag & _TOP_P) != 0, tl.load(pivots), tl.load(pivots + 1),
            tl.load(pivots + 2), tl.load(pivots + 3), SIZE, ABOUT,
        )
        sums = scratch.sums + (at * num_spans + tl.program_id(0)) * (PIVOTS + 1)
        tl.store(sums, total)
        tl.store(sums + 1, sum0)
        tl.store(sums + 2, sum1)
        tl.store(sums + 3, sum2)
        tl.store(sums + 4, sum3)


@kernel(do_not_specialize=["num_spans", "span"], do_not_specialize_on_alignment=SLICES)
def _settle_kernel(
    logits, edited, row, rows, position, span_greatest, scratch, tokens, bad, thresholds, logit_stride, edited_stride,
    vocab, num_tiles, num_groups, num_spans, span, FIRST: tl.constexpr, LAST: tl.constexpr, THRESHOLDS: tl.constexpr,
    ROOM: tl.constexpr, PIVOTS: tl.constexpr, QUADS: tl.constexpr, SPANS: tl.constexpr, PDL: tl.constexpr,
):
    """Each program draws the token of one logit row with top-k or top-p that was not drawn from candidates, or leaves
    it to the LAST round."""
    release_dependents(PDL)
    wait_for_inputs(PDL)
    at = tl.program_id(0).to(tl.int64)
    of = tl.load(row + at)
    flag, top_k = tl.load(rows.flags + of), tl.load(rows.top_k + of)
    takes_part = ((flag & _SEARCHED) != 0) & (not _is_listed(scratch, at, flag, top_k, num_groups, ROOM))
    if not FIRST:
        takes_part = takes_part & (tl.load(scratch.is_pending + at, mask=takes_part, other=0) != 0)
    if takes_part:
        own = own_logits(logits, edited, at, logit_stride, edited_stride, flag)
        greatest = greatest_of_spans(span_greatest + at * num_spans, num_spans, SPANS)
        is_bad = tl.abs(greatest) == float("inf")
        chosen = tl.full([], 0, dtype=tl.int32)
        if FIRST:
            tl.store(scratch.is_pending + at, 0)
        if not is_bad:
            temperature, floor = tl.load(rows.temperature + of), tl.load(rows.min_p_floor + of)
            if LAST | is_weighed(flag, top_k, num_groups):
                chosen, limit, furthest, outside = draw_by_rejection(
                    own, tl.load(position + at).to(tl.uint32), of, flag, rows, scratch, at, greatest, temperature,
                    floor, vocab, num_tiles, num_groups, num_spans, span, FIRST, LAST, PIVOTS, QUADS, SPANS,
                )
                if THRESHOLDS:
                    if tl.load(rows.num_logprobs + of) >= 0:
                        furthest = furthest_kept(own, num_tiles, vocab, greatest, temperature, floor,
                                                 (flag & _TOP_P) != 0, limit, furthest, outside, 4 * QUADS)
                    tl.store(thresholds + at, tl.maximum(floor, scaled_at(furthest)))
            else:
                tl.store(scratch.is_pending + at, 1)
        tl.store(bad + at, is_bad)
        tl.store(tokens + at, chosen.to(tl.int64))


def draw_filtered(
    logits: torch.Tensor, edited: torch.Tensor, row: torch.Tensor, position: torch.Tensor, rows: FilterRows,
    spans: Spans, *, any_searched: bool = True, thresholds: bool = False, pdl: bool | None = None,
) -> Drawn:
    """Draw the tokens of logit rows [logit rows, vocabulary] after `edit_logits`, which returned `edited` and filled
    `spans`.

    A logit row is read from `edited` if its row has edits. If it has filters, it draws from the tokens that they keep;
    otherwise it draws as `draw_tokens` does, bit for bit. If `any_searched` is false, no request has a top-k or top-p.
    """
    name, device, (num, vocab) = "draw_filtered", logits.device, logits.shape
    _check(name, logits, edited, row, position, rows)

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    ints, floats = torch.int32, torch.float32
    drawn = Drawn(empty(num, dtype=torch.int64), empty(num, dtype=torch.bool), empty(num, dtype=floats))
    if num == 0:
        return drawn
    num_spans, height = spans.grid[0], num if any_searched else 0
    scratch = _Scratch(
        empty(num, num_spans, dtype=floats), empty(num, num_spans, dtype=ints), empty(height, PIVOTS, dtype=ints),
        empty(height, 2, dtype=ints), empty(height, dtype=ints),
        empty(height, num_spans, _SUMS, dtype=torch.int64), spans.num_candidates, empty(height, _ROOM, dtype=floats),
        empty(height, _ROOM, dtype=ints), empty(height, dtype=ints),
    )
    pdl = uses_pdl(device) if pdl is None else pdl
    options = {"SPANS": spans.most, "PDL": pdl, "enable_fp_fusion": False, **pdl_options(pdl)}
    common, num_groups = (logits, edited, row, rows), spans.group_greatest.shape[1]
    sizes = (logits.stride(0), edited.stride(0), vocab, spans.num_tiles, num_groups)
    groups, is_bounded = next_power_of_two(num_groups), any_searched and num >= _MANY_ROWS
    if is_bounded:  # a row's programs would each look for it; of few rows that takes less than one more launch
        _bound_kernel[(num,)](row, rows, spans.greatest, spans.group_greatest, scratch, num_groups, num_spans,
                              GROUPS=groups, num_warps=4, **options)
    _score_filtered_kernel[spans.grid](
        *common, position, spans.greatest, spans.group_greatest, scratch, *sizes, spans.length, BOUNDED=is_bounded,
        ROOM=_ROOM, QUADS=QUADS, GROUPS=groups, GROUP=GROUP, num_warps=4, **options,
    )
    _pick_filtered_kernel[(num,)](
        *common, position, spans.greatest, scratch, *drawn, *sizes, num_spans, ROOM=_ROOM, LISTED=_SEARCH_TILE,
        PIVOTS=PIVOTS, num_warps=4, **options,
    )
    for is_first, is_last in _rounds(num, thresholds) if any_searched else ():
        _weigh_kernel[spans.grid](
            *common, spans.greatest, scratch, *sizes, spans.length, FIRST=is_first, ABOUT=is_first and not is_last,
            PIVOTS=PIVOTS, SIZE=TILE, num_warps=_WEIGH_WARPS, maxnreg=_REGISTERS, **options,
        )
        _settle_kernel[(num,)](
            *common, position, spans.greatest, scratch, *drawn, *sizes, num_spans, spans.length, FIRST=is_first,
            LAST=is_last, THRESHOLDS=thresholds, ROOM=_ROOM, PIVOTS=PIVOTS, QUADS=QUADS,
            num_warps=4, **options,
        )
    return drawn


def _rounds(num_logit_rows: int, thresholds: bool) -> list[tuple[bool, bool]]:
    """Return the rounds in which weights are summed and tokens decided: for each, (whether it is the first, whether it
    is the last). With many logit rows one of them mostly needs a second round, which all programs share. With few rows
    a second round is rare, and the row's own program does its work."""
    return [(True, True)] if thresholds or num_logit_rows < _MANY_ROWS else [(True, False), (False, True)]


def _check(name: str, logits: torch.Tensor, edited: torch.Tensor, row: torch.Tensor, position: torch.Tensor,
           rows: FilterRows) -> None:
    device, (num, vocab) = logits.device, logits.shape
    require_tensor(name, "logits", logits, (None, None), device, (torch.float32,))
    require_tensor(name, "edited", edited, (num, vocab), device, (torch.float32,))
    require_tensor(name, "row", row, (num,), device, (torch.int64,))
    require_tensor(name, "position", position, (num,), device, (torch.int64,))
    for field, tensor in zip(rows._fields, rows, strict=True):
        dtype = torch.float32 if field in ("temperature", "top_p", "min_p_floor") else torch.int64
        require_tensor(name, f"rows.{field}", tensor, (rows.flags.shape[0],), device, (dtype,))
