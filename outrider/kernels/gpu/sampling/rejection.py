"""Draws from the tokens that top-p keeps, by rejection, so that no threshold has to be searched for.

If the token with the best score of all is one that top-p keeps, it is the one to draw. Whether a token is kept depends
on the weight of all tokens nearer to the greatest logit than it (`masses.py`), which is one sum over the row. If it is
not kept, neither are those that are as far or further, and the best of the remaining tokens is tried next.

These are device functions; `filtered_draw.py` has the kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.kernels import sampling_flags as flags
from outrider.kernels.gpu.sampling.candidates import has_candidates
from outrider.kernels.gpu.sampling.masses import (
    INFINITE,
    SLACK,
    UNKNOWN,
    distance_of,
    furthest_kept,
    narrowed,
    scaled_at,
    weight_of_bits,
    weights_within,
)
from outrider.kernels.gpu.sampling.scans import NO_ID, SHIFT, scan_all

_TOP_K, _TOP_P, _SEARCHED = tl.constexpr(flags.TOP_K), tl.constexpr(flags.TOP_P), tl.constexpr(flags.SEARCHED)


@triton.jit
def is_weighed(flag, top_k, num_groups):
    """Whether the weight of likelier tokens decides a row: it has only a top-p, or only a top-k that is without
    candidates."""
    searched = flag & _SEARCHED
    return (searched == _TOP_P) | ((searched == _TOP_K) & (top_k > num_groups))


@triton.jit
def best_nearer(score, distance, before):
    """Return the distance of the token with the best score that is nearer than `before`; 0 if there is none."""
    is_in = distance < before
    top = tl.max(tl.where(is_in, score, float("-inf")), axis=0)
    return tl.max(tl.where(is_in & (score == top), distance, 0), axis=0)


@triton.jit
def token_distances(own, token, shift, temperature, vocab):
    """Return the distances of spans' best tokens, or a value for "unknown" if a span has none."""
    is_token = token < vocab
    logit = tl.load(own + token, mask=is_token, other=float("-inf"))
    return tl.where(is_token, distance_of(tl.div_rn(logit - shift, temperature)), UNKNOWN)


@triton.jit
def _limit_of(flag, top_k, top_p, total):
    """Return the limit: a token is kept if all likelier tokens together weigh less."""
    return tl.where((flag & _TOP_P) != 0, total.to(tl.float64) * top_p.to(tl.float64), top_k.to(tl.float64))


@triton.jit
def _sum_of(weights, valid, ABOUT: tl.constexpr):
    """Sum the weights of spans: an integer, or with ABOUT an approximate weight as in `weights_within`."""
    weight = tl.load(weights, mask=valid, other=0)
    if ABOUT:
        return tl.sum(weight_of_bits(weight), axis=0)
    else:
        return tl.sum(weight, axis=0)


@triton.jit
def _weighed_pivots(
    scratch, at, flag, top_k, top_p, num_spans, FIRST: tl.constexpr, ABOUT: tl.constexpr, PIVOTS: tl.constexpr,
    SPANS: tl.constexpr,
):
    """Return (limit, greatest distance known to be kept, least known not to be) after the pivots were weighed. ABOUT:
    weights are approximate, so a pivot whose weight is close to the limit decides nothing."""
    span = tl.arange(0, SPANS)
    sums = scratch.sums + (at * num_spans + span) * (PIVOTS + 1)
    total = _sum_of(sums, span < num_spans, ABOUT)
    limit, slack = _limit_of(flag, top_k, top_p, total), 0.0
    if ABOUT:
        slack = tl.where((flag & _TOP_P) != 0, total * SLACK, 0.0)
    if FIRST:
        inside, outside = tl.full([], 0, dtype=tl.int32), tl.full([], INFINITE, dtype=tl.int32)
    else:
        inside, outside = tl.load(scratch.brackets + 2 * at), tl.load(scratch.brackets + 2 * at + 1)
    for index in tl.static_range(PIVOTS):
        pivot = tl.load(scratch.pivots + at * PIVOTS + index)
        weight = _sum_of(sums + 1 + index, span < num_spans, ABOUT)
        if pivot > 0:  # the greatest logit is always kept
            inside, outside = narrowed(inside, outside, pivot, weight, limit, slack)
    return limit, inside, outside


@triton.jit
def _search_top_k(own, flag, top_k, top_p, shift, temperature, floor, vocab, num_tiles, SIZE: tl.constexpr):
    """Return (limit, least distance known not to be kept) of a row whose top-k has no candidates."""
    limit, outside = top_k.to(tl.float64), tl.full([], INFINITE, dtype=tl.int32)
    if (flag & _TOP_P) != 0:  # of what top-k leaves
        inside = tl.full([], 0, dtype=tl.int32)
        outside = 1 + furthest_kept(own, num_tiles, vocab, shift, temperature, floor, False, limit, inside, outside,
                                    SIZE)
        _, total, _, _, _ = weights_within(
            own, 0, num_tiles, vocab, shift, temperature, floor, True, outside, outside, outside, outside, SIZE
        )
        limit = _limit_of(flag, top_k, top_p, total)
    return limit, outside


@triton.jit
def _best_of_spans(scratch, at, has_scores, num_spans, SPANS: tl.constexpr):
    """Return (scores, tokens) [SPANS]: the best token of each span. Without scores every span is treated as the best,
    so that each one is scored."""
    index = tl.arange(0, SPANS)
    is_span = index < num_spans
    if has_scores:
        score = tl.load(scratch.scores + at * num_spans + index, mask=is_span, other=float("-inf"))
        token = tl.load(scratch.tokens + at * num_spans + index, mask=is_span, other=NO_ID)
    else:
        score = tl.where(is_span, float("inf"), float("-inf"))
        token = tl.full([SPANS], NO_ID, dtype=tl.int32)
    return score, token


@triton.jit
def _narrowed_by_four(inside, outside, pivot0, pivot1, pivot2, pivot3, sum0, sum1, sum2, sum3, limit):
    """Narrow the bracket by four pivots with exact weights, as `narrowed` does by one. Pivot 0 always counts; pivots 1
    to 3 count if they are positive."""
    inside, outside = narrowed(inside, outside, pivot0, sum0, limit, 0.0)
    if pivot1 > 0:
        inside, outside = narrowed(inside, outside, pivot1, sum1, limit, 0.0)
    if pivot2 > 0:
        inside, outside = narrowed(inside, outside, pivot2, sum2, limit, 0.0)
    if pivot3 > 0:
        inside, outside = narrowed(inside, outside, pivot3, sum3, limit, 0.0)
    return inside, outside


@triton.jit
def _leave_pivots(scratch, at, pivot0, pivot1, pivot2, pivot3, inside, outside, PIVOTS: tl.constexpr):
    """Store a row's pivots, to be weighed before the next round."""
    pivots = scratch.pivots + at * PIVOTS
    tl.store(pivots, pivot0)
    tl.store(pivots + 1, pivot1)
    tl.store(pivots + 2, pivot2)
    tl.store(pivots + 3, pivot3)
    tl.store(scratch.brackets + 2 * at, inside)
    tl.store(scratch.brackets + 2 * at + 1, outside)
    tl.store(scratch.is_pending + at, 1)


@triton.jit
def draw_by_rejection(
    own, position_word, of, flag, rows, scratch, at, shift, temperature, floor, vocab, num_tiles, num_groups,
    num_spans, span,
    FIRST: tl.constexpr, LAST: tl.constexpr, PIVOTS: tl.constexpr, QUADS: tl.constexpr, SPANS: tl.constexpr,
):
    """Draw for a row that is weighed or has too many candidates: returns (token, limit, greatest distance known to be
    kept, least known not to be). If the row needs a pivot that was not weighed, it reads its logits again in the LAST
    round; in an earlier round it stores its pivots to be weighed, and sets a mark in `scratch.is_pending`."""
    SIZE: tl.constexpr = 4 * QUADS
    top_k, top_p, is_mass = tl.load(rows.top_k + of), tl.load(rows.top_p + of), (flag & _TOP_P) != 0
    index = tl.arange(0, SPANS)
    # Of a row with too many candidates no span has been scored.
    score, token = _best_of_spans(scratch, at, not has_candidates(flag, top_k, num_groups), num_spans, SPANS)
    distance = token_distances(own, token, shift, temperature, vocab)
    limit, inside, outside = _weighed_pivots(
        scratch, at, flag, top_k, top_p, num_spans, FIRST, FIRST and not LAST, PIVOTS, SPANS
    )
    if LAST:
        if not is_weighed(flag, top_k, num_groups):
            inside = tl.full([], 0, dtype=tl.int32)
            limit, outside = _search_top_k(own, flag, top_k, top_p, shift, temperature, floor, vocab, num_tiles, SIZE)
    seed, word2 = tl.load(rows.seed + of), tl.load(rows.sample_index + of).to(tl.uint32)
    chosen = tl.full([], -1, dtype=tl.int32)
    while chosen < 0:
        top = tl.max(score, axis=0)
        # A span whose best token is not kept has no better one: it is scored again when its turn comes.
        stale = tl.min(tl.where((score == top) & (distance >= outside), index, SPANS), axis=0)
        if stale < SPANS:
            best, its_token = scan_all(
                own, rows.seed, stale * span, tl.minimum(stale * span + span, num_tiles), vocab, temperature, shift,
                tl.maximum(floor, scaled_at(outside - 1)), seed, position_word, word2, SHIFT, False, True, QUADS,
            )
            its_token = tl.where(best > float("-inf"), its_token, NO_ID)
            score = tl.where(index == stale, best, score)
            token = tl.where(index == stale, its_token, token)
            distance = tl.where(index == stale, token_distances(own, its_token, shift, temperature, vocab), distance)
        else:
            best_token = tl.min(tl.where(score == top, token, NO_ID), axis=0)
            pivot0 = token_distances(own, best_token, shift, temperature, vocab)
            if pivot0 <= inside:
                chosen = best_token
            else:
                pivot1 = best_nearer(score, distance, pivot0)
                pivot2 = best_nearer(score, distance, pivot1)
                pivot3 = best_nearer(score, distance, pivot2)
                if LAST:
                    _, sum0, sum1, sum2, sum3 = weights_within(
                        own, 0, num_tiles, vocab, shift, temperature, floor, is_mass, pivot0, pivot1, pivot2, pivot3,
                        SIZE
                    )
                    inside, outside = _narrowed_by_four(
                        inside, outside, pivot0, pivot1, pivot2, pivot3, sum0, sum1, sum2, sum3, limit
                    )
                else:
                    _leave_pivots(scratch, at, pivot0, pivot1, pivot2, pivot3, inside, outside, PIVOTS)
                    chosen = best_token  # the next round replaces it
    return chosen, limit, inside, outside
