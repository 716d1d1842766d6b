"""Candidates of top-k: the few tokens of a logit row that can be among its k likeliest, listed and drawn from.

    1. the bound         k tiles hold a logit that reaches the k-th greatest of the tiles' maxima
    2. the candidates    tokens that reach the bound, in any order: what is found among them does not depend on it
    3. two searches      the furthest distance that top-k keeps, then top-p among those, by bisection
    4. the draw          from the candidates that are kept

Device functions; `filtered_draw.py` has the kernels. `masses.py` says what a distance and a mass are.
"""

from __future__ import annotations

import triton
import triton.language as tl
from outrider.kernels import sampling_flags as flags
from outrider.kernels.triton.logprobs import nth_greatest
from outrider.kernels.triton.masses import INFINITE, distance_of, probability_mass, scaled_logits
from outrider.kernels.triton.sampling import NO_ID, best_of, better, gumbel, word_of

_TOP_K, _TOP_P = tl.constexpr(flags.TOP_K), tl.constexpr(flags.TOP_P)


@triton.jit
def has_candidates(flag, top_k, num_tiles):
    """Whether candidates are listed for a row: its k is at most the number of tiles."""
    return ((flag & _TOP_K) != 0) & (top_k <= num_tiles)


@triton.jit
def list_candidates(
    own, first, last, vocab, num_tiles, top_k, shift, heat, floor, tile_greatest, count, values, ids,
    ROOM: tl.constexpr, TILES: tl.constexpr, SIZE: tl.constexpr,
):
    """Adds the candidates of tiles [first, last) to the row's, as long as there is room, and counts all of them."""
    bound = tl.div_rn(nth_greatest(tile_greatest, top_k, num_tiles, TILES) - shift, heat)
    bound = tl.maximum(bound, floor)
    for tile in range(first, last):
        if tl.div_rn(tl.load(tile_greatest + tile) - shift, heat) >= bound:
            token = tile * SIZE + tl.arange(0, SIZE)
            scaled = scaled_logits(own, token, token < vocab, shift, heat, floor)
            is_in = (scaled >= bound) & (scaled > float("-inf"))
            found = tl.sum(is_in.to(tl.int32), axis=0)
            if found > 0:
                place = tl.atomic_add(count, found, sem="relaxed") + tl.cumsum(is_in.to(tl.int32), axis=0) - 1
                tl.store(values + place, scaled, mask=is_in & (place < ROOM))
                tl.store(ids + place, token, mask=is_in & (place < ROOM))


@triton.jit
def _weigh(distance, nearest, mass, values, found, SIZE: tl.constexpr):
    """(number, mass) of the candidates strictly nearer than a distance. The first of them are in registers."""
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
def furthest_candidate(flag, top_k, top_p, values, found, SIZE: tl.constexpr):
    """The greatest distance that top-k keeps, and top-p of what top-k leaves."""
    index = tl.arange(0, SIZE)
    scaled = tl.load(values + index, mask=index < found, other=float("-inf"))
    nearest, mass = distance_of(scaled), probability_mass(scaled)
    inside, outside = tl.full([], 0, dtype=tl.int32), tl.full([], INFINITE, dtype=tl.int32)
    while outside - inside > 1:
        middle = inside + (outside - inside) // 2
        count, _ = _weigh(middle, nearest, mass, values, found, SIZE)
        inside = tl.where(count < top_k, middle, inside)
        outside = tl.where(count < top_k, outside, middle)
    if (flag & _TOP_P) != 0:
        _, total = _weigh(outside, nearest, mass, values, found, SIZE)
        limit = total.to(tl.float64) * top_p.to(tl.float64)
        inside = tl.full([], 0, dtype=tl.int32)
        while outside - inside > 1:
            middle = inside + (outside - inside) // 2
            _, weight = _weigh(middle, nearest, mass, values, found, SIZE)
            inside = tl.where(weight.to(tl.float64) < limit, middle, inside)
            outside = tl.where(weight.to(tl.float64) < limit, outside, middle)
    return inside


@triton.jit
def draw_candidate(furthest, values, ids, found, key, word1, word2, SIZE: tl.constexpr):
    """The candidate with the best score among those that are no further."""
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
