"""Candidates of top-k: the few tokens of a logit row that can be among its k likeliest, listed and drawn from.

    1. the bound         a distance within which k groups of tokens, or a few more, have a token
    2. the candidates    all tokens within it, in any order: what is found among them does not depend on the order
    3. two searches      the distance up to which top-k keeps tokens, then the one for top-p among those, by bisection
    4. the draw          from the candidates that are kept

These are device functions; `filtered_draw.py` has the kernels. `masses.py` says what a distance and a mass are. The
searches count the candidates strictly within a distance, so that tokens at equal distances are kept or dropped
together.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.kernels import sampling_flags as flags
from outrider.kernels.gpu.sampling.masses import INFINITE, UNKNOWN, distance_of, probability_mass, scaled_logits
from outrider.kernels.gpu.sampling.scans import NO_ID, best_of, better, gumbel, word_of

_TOP_K, _TOP_P = tl.constexpr(flags.TOP_K), tl.constexpr(flags.TOP_P)


@triton.jit
def has_candidates(flag, top_k, num_groups):
    """Whether candidates are listed for a row: it has a top-k, and k is at most the number of groups."""
    return ((flag & _TOP_K) != 0) & (top_k <= num_groups)


@triton.jit
def bound_of(group_greatest, num_groups, top_k, shift, temperature, GROUPS: tl.constexpr):
    """Return a distance within which at least k groups of tokens have a token, and not many more groups. If nearly all
    groups have one, most have several, so fewer extra groups are allowed: otherwise there would be too many
    candidates."""
    group = tl.arange(0, GROUPS)
    greatest = tl.load(group_greatest + group, mask=group < num_groups, other=float("-inf"))
    distance = tl.where(group < num_groups, distance_of(tl.div_rn(greatest - shift, temperature)), UNKNOWN)
    inside, outside = tl.full([], 0, dtype=tl.int32), tl.full([], INFINITE + 1, dtype=tl.int32)
    num_within = tl.sum((distance < outside).to(tl.int32), axis=0)
    enough = top_k + tl.minimum(8 + top_k // 4, (num_groups - top_k) // 8)
    while (outside - inside > 1) & (num_within > enough):
        middle = inside + (outside - inside) // 2
        count = tl.sum((distance < middle).to(tl.int32), axis=0)
        inside = tl.where(count < top_k, middle, inside)
        outside = tl.where(count < top_k, outside, middle)
        num_within = tl.where(count < top_k, num_within, count)
    return outside


@triton.jit
def list_candidates(
    own, first, last, vocab, bound, shift, temperature, floor, group_greatest, count, values, ids,
    ROOM: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr,
):
    """Add the candidates of tiles [first, last) to the row's list while it has room. All of them are counted, so that
    an overflow is noticed."""
    for tile in range(first, last):
        greatest = tl.load(group_greatest + tile * (SIZE // GROUP) + tl.arange(0, SIZE // GROUP))
        if tl.min(distance_of(tl.div_rn(greatest - shift, temperature)), axis=0) < bound:
            token = tile * SIZE + tl.arange(0, SIZE)
            scaled = scaled_logits(own, token, token < vocab, shift, temperature, floor)
            is_in = (distance_of(scaled) < bound) & (scaled > float("-inf"))
            found = tl.sum(is_in.to(tl.int32), axis=0)
            if found > 0:
                place = tl.atomic_add(count, found, sem="relaxed") + tl.cumsum(is_in.to(tl.int32), axis=0) - 1
                tl.store(values + place, scaled, mask=is_in & (place < ROOM))
                tl.store(ids + place, token, mask=is_in & (place < ROOM))


@triton.jit
def _weigh(distance, nearest, mass, values, found, SIZE: tl.constexpr):
    """Return (number, mass) of the candidates strictly within a distance. The first SIZE candidates are in
    registers."""
    is_in = nearest < distance
    count = is_in.to(tl.int32)
    weight = tl.where(is_in, mass, 0)
    for first in range(SIZE, found, SIZE):
        index = first + tl.arange(0, SIZE)
        scaled = tl.load(values + index, mask=index < found, other=float("-inf"))
        is_in = distance_of(scaled) < distance
        count += is_in.to(tl.int32)
        weight += tl.where(is_in, probability_mass(scaled), 0)
    return tl.sum(count, axis=0), tl.sum(weight, axis=0)


@triton.jit
def _furthest(nearest, values, found, SIZE: tl.constexpr):
    """Return the greatest distance of a candidate. The first SIZE candidates are in registers."""
    furthest = tl.where(tl.arange(0, SIZE) < found, nearest, 0)
    for first in range(SIZE, found, SIZE):
        index = first + tl.arange(0, SIZE)
        scaled = tl.load(values + index, mask=index < found, other=0.0)
        furthest = tl.maximum(furthest, distance_of(scaled))
    return tl.max(furthest, axis=0)


@triton.jit
def furthest_candidate(flag, top_k, top_p, values, found, SIZE: tl.constexpr):
    """Return a distance that separates the candidates: within it are exactly those that top-k keeps and, of these,
    top-p keeps."""
    index = tl.arange(0, SIZE)
    scaled = tl.load(values + index, mask=index < found, other=float("-inf"))
    nearest, mass = distance_of(scaled), probability_mass(scaled)
    inside, num_within = tl.full([], 0, dtype=tl.int32), found
    outside = 1 + _furthest(nearest, values, found, SIZE)
    while (outside - inside > 1) & (num_within > top_k):
        middle = inside + (outside - inside) // 2
        count, _ = _weigh(middle, nearest, mass, values, found, SIZE)
        inside = tl.where(count < top_k, middle, inside)
        outside = tl.where(count < top_k, outside, middle)
        num_within = tl.where(count < top_k, num_within, count)
    if (flag & _TOP_P) != 0:
        _, total = _weigh(outside, nearest, mass, values, found, SIZE)
        limit = total.to(tl.float64) * top_p.to(tl.float64)
        inside, num_kept = tl.full([], 0, dtype=tl.int32), tl.full([], 0, dtype=tl.int32)
        # The candidate next to those whose weight stays below the limit is kept.
        while (outside - inside > 1) & (num_within - num_kept > 1):
            middle = inside + (outside - inside) // 2
            count, weight = _weigh(middle, nearest, mass, values, found, SIZE)
            is_kept = weight.to(tl.float64) < limit
            inside, num_kept = tl.where(is_kept, middle, inside), tl.where(is_kept, count, num_kept)
            outside, num_within = tl.where(is_kept, outside, middle), tl.where(is_kept, num_within, count)
    return outside - 1


@triton.jit
def draw_candidate(furthest, values, ids, found, key, word1, word2, SIZE: tl.constexpr):
    """Return the candidate with the best score within the distance."""
    zero = tl.zeros([SIZE], dtype=tl.uint32)
    best_score = tl.full([SIZE], float("-inf"), dtype=tl.float32)
    best_token = tl.full([SIZE], NO_ID, dtype=tl.int32)
    for first in range(0, found, SIZE):
        index = first + tl.arange(0, SIZE)
        valid = index < found
        scaled = tl.load(values + index, mask=valid, other=float("-inf"))
        score = scaled + gumbel(word_of(ids, index, valid, key, word1, word2, zero))
        score = tl.where(valid & (distance_of(scaled) <= furthest), score, float("-inf"))
        best_score, best_token = better(score, tl.load(ids + index, mask=valid, other=NO_ID), best_score, best_token)
    _, token = best_of(best_score, best_token)
    return token
