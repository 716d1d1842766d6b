"""Finds the best-scored token of some tiles of a logit row: greedily, or with Gumbel noise from a sampling key. These
are device functions; `draw.py` and `filtered_draw.py` have the kernels.

Noise is lane t % 4 of Philox 4x32-10 for token id t, so a tile is read in quads of token ids.
"""

from __future__ import annotations

import triton
import triton.language as tl

NO_ID = tl.constexpr(2147483647)
# What is done to a logit before its noise is added, if any is.
GREEDY, AS_IS, DIVIDE, SHIFT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit
def gumbel(bits):
    """Make standard Gumbel noise from 32 random bits. log1p is computed explicitly, because log(1 - v) loses small
    v."""
    v = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.9999999403953552)
    u = 1.0 - v
    log1p = tl.where(u == 1.0, -v, tl.log(u) * (v / tl.where(u == 1.0, 1.0, 1.0 - u)))
    return -tl.log(-log1p)


@triton.jit
def better(score, token, best_score, best_token):
    wins = (score > best_score) | ((score == best_score) & (token < best_token))
    return tl.where(wins, score, best_score), tl.where(wins, token, best_token)


@triton.jit
def best_of(score, token):
    """Return (highest score, lowest token that has it) of a tile."""
    top = tl.max(score, axis=0)
    return top, tl.min(tl.where(score == top, token, NO_ID), axis=0)


@triton.jit
def load_logits(logits, token, valid):
    """Load logits. A NaN counts as the greatest, so that it is chosen and the caller sees it."""
    logit = tl.load(logits + token, mask=valid, other=float("-inf")).to(tl.float32)
    return tl.where(logit == logit, logit, float("inf"))


@triton.jit
def load_quads(logits, quad, vocab, QUADS: tl.constexpr):
    """Load the four logits of each quad together, with NaN treated as in `load_logits`."""
    token = quad[:, None] * 4 + tl.arange(0, 4)[None, :]
    even, odd = tl.split(tl.reshape(load_logits(logits, token, token < vocab), [QUADS, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def word_of(ids, token, valid, key, word1, word2, zero):
    """Return 32 random bits for each token, made from its id."""
    target = tl.load(ids + token, mask=valid, other=0)
    words = tl.philox(key, (target // 4).to(tl.uint32), zero + word1, zero + word2, zero)
    lane = target % 4
    low, high = tl.where(lane == 0, words[0], words[1]), tl.where(lane == 2, words[2], words[3])
    return tl.where(lane < 2, low, high)


@triton.jit
def scan(
    logits, first, last, vocab, temperature, shift, threshold, key, word1, word2, FULL: tl.constexpr,
    QUADS: tl.constexpr
):
    """Return the best (score, token) of tiles [first, last): the result of `scan_all` with SHIFT, mostly without its
    logarithms.

    With noise -log(e), e exponentially distributed, the best score belongs to the least e / exp(scaled). The key v /
    exp(scaled) is cheaper: v, the uniform number from which e is made, is never greater than e, and hardly less where
    it is small. A token's score is computed only if its key is the least at its place in all tiles. That is enough if
    no other key at a place is as small as one that could belong to the best score; otherwise everything is computed
    again in full.
    """
    zero = tl.zeros([QUADS], dtype=tl.uint32)
    least = tl.full([QUADS], float("inf"), dtype=tl.float32)
    second = tl.full([QUADS], float("inf"), dtype=tl.float32)
    token_of = tl.full([QUADS], NO_ID, dtype=tl.int32)
    bits_of = tl.full([QUADS], 0, dtype=tl.uint32)
    slope = -1.4426950408889634 / temperature
    lowest = threshold - tl.abs(threshold) * 1e-6  # a quotient's rounding
    for tile in range(first, last):
        quad = tile * QUADS + tl.arange(0, QUADS)
        bits = tl.philox(key, quad.to(tl.uint32), zero + word1, zero + word2, zero)
        logit = load_quads(logits, quad, vocab, QUADS)
        for lane in tl.static_range(4):
            token = quad * 4 + lane
            power = (logit[lane] - shift) * slope
            own = (bits[lane].to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10) * tl.exp2(power)
            if FULL:
                own = tl.where(power <= lowest * -1.4426950408889634, own, float("inf"))
            is_less = own < least
            second = tl.minimum(second, tl.where(is_less, least, own))
            least = tl.where(is_less, own, least)
            token_of = tl.where(is_less, token, token_of)
            bits_of = tl.where(is_less, bits[lane], bits_of)
    is_token = token_of < vocab
    scaled = tl.div_rn(load_logits(logits, token_of, is_token) - shift, temperature)
    score = tl.where(is_token, scaled + gumbel(bits_of), float("-inf"))
    is_kept = is_token
    if FULL:
        is_kept = scaled >= threshold
        score = tl.where(is_kept, score, float("-inf"))
    best, chosen = best_of(score, token_of)
    # Roundings of keys and scores together stay far below a thousandth.
    bound = tl.exp2(best * -1.4426950408889634) * 1.001
    is_open = (second <= bound) | ((least <= bound) & (not is_kept))
    if (tl.max(is_open.to(tl.int32), axis=0) > 0) | (best == float("-inf")):
        best, chosen = scan_all(
            logits, logits, first, last, vocab, temperature, shift, threshold, key, word1, word2, SHIFT, False, FULL,
            QUADS
        )
    return best, chosen


@triton.jit
def scan_all(
    logits, ids, first, last, vocab, temperature, shift, threshold, key, word1, word2,
    SCALE: tl.constexpr, MAPPED: tl.constexpr, FULL: tl.constexpr, QUADS: tl.constexpr,
):
    """Return the best (score, token) of tiles [first, last), with noise for all four token ids of each quad."""
    zero = tl.zeros([QUADS], dtype=tl.uint32)
    best_score = tl.full([QUADS], float("-inf"), dtype=tl.float32)
    best_token = tl.full([QUADS], NO_ID, dtype=tl.int32)
    for tile in range(first, last):
        quad = tile * QUADS + tl.arange(0, QUADS)
        if not MAPPED:
            bits = tl.philox(key, quad.to(tl.uint32), zero + word1, zero + word2, zero)
        for lane in tl.static_range(4):
            token = quad * 4 + lane
            valid = token < vocab
            score = load_logits(logits, token, valid)
            if SCALE == SHIFT:
                score = tl.div_rn(score - shift, temperature)
            elif SCALE == DIVIDE:
                score = tl.div_rn(score, temperature)
            is_kept = score >= threshold
            if MAPPED:
                score += gumbel(word_of(ids, token, valid, key, word1, word2, zero))
            else:
                score += gumbel(bits[lane])
            if FULL:
                score = tl.where(is_kept, score, float("-inf"))
            best_score, best_token = better(score, tl.where(valid, token, NO_ID), best_score, best_token)
    return best_of(best_score, best_token)


@triton.jit
def scan_mass(logits, first, last, vocab, SIZE: tl.constexpr):
    """Return (greatest logit, sum of exp(logit - greatest)) of tiles [first, last)."""
    greatest = tl.full([SIZE], float("-inf"), dtype=tl.float32)
    for tile in range(first, last):
        token = tile * SIZE + tl.arange(0, SIZE)
        greatest = tl.maximum(greatest, load_logits(logits, token, token < vocab))
    top = tl.max(greatest, axis=0)
    mass = tl.zeros([SIZE], dtype=tl.float32)
    for tile in range(first, last):
        token = tile * SIZE + tl.arange(0, SIZE)
        mass += tl.exp(load_logits(logits, token, token < vocab) - top)
    return top, tl.sum(mass, axis=0)


@triton.jit
def scan_greedy(logits, first, last, vocab, SIZE: tl.constexpr):
    """Return the best (logit, token) of tiles [first, last), without noise; tokens are read in order."""
    best_score = tl.full([SIZE], float("-inf"), dtype=tl.float32)
    best_token = tl.full([SIZE], NO_ID, dtype=tl.int32)
    for tile in range(first, last):
        token = tile * SIZE + tl.arange(0, SIZE)
        valid = token < vocab
        score = load_logits(logits, token, valid)
        best_score, best_token = better(score, tl.where(valid, token, NO_ID), best_score, best_token)
    return best_of(best_score, best_token)
