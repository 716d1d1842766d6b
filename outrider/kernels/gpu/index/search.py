"""Finds the smallest score that top-k chooses (the *least chosen score*): the parts that the kernels for few and for
many token rows share.

A context's scores are not sorted. A sample of them gives a bound that about twice as many scores reach as are to be
chosen. The scores that reach it are listed as *candidates*. The least chosen score is then searched among the
candidates, in registers: guess a score, count the candidates at or above it, narrow the range. A sample may mislead:
then the list has too few candidates, or more than there is room for. The kernel notices this and searches the whole
context in memory, which is slower but gives the same result. Scores are compared as integers in the same order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.kernels.gpu.common import next_power_of_two
from outrider.kernels.latent import NOT_CHOSEN

MAX_ROOM, MIN_ROOM = 8192, 256  # for candidates
MAX_SAMPLE, MIN_SAMPLE = 16384, 256
SAMPLED = 64  # chosen scores that a sample has, on average
LEAST = tl.constexpr(-2147483648)  # of ordered scores
GREATEST = tl.constexpr(2147483647)
NONE = tl.constexpr(NOT_CHOSEN)
ALIGNED = tl.constexpr(16)  # positions at which wide loads may begin
_RUN = tl.constexpr(8)  # neighbouring positions of a sample: what memory gives at once
_GUESSES = tl.constexpr(24)


def room_for(top_k: int) -> int:
    """Return how many candidates of a token row the list has room for. A context with no more positions than that needs
    no sample."""
    return min(MAX_ROOM, max(MIN_ROOM, next_power_of_two(4 * top_k)))


def sample_size(num_keys: int, top_k: int) -> int:
    return min(MAX_SAMPLE, max(MIN_SAMPLE, next_power_of_two(SAMPLED * num_keys // top_k)))


@triton.jit
def ordered(score):
    """Convert scores to integers in the same order; -0.0 counts as 0.0, as in a sort."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def number(order):
    """Convert an ordered integer back to its score."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def guess_between(bottom, top, not_below, above, wanted, turn):
    """Guess the score, as an ordered integer in (bottom, top], such that `wanted` scores are at or above it.
    `not_below` scores are at or above the bottom, and `above` scores are above the top. The guess assumes that scores
    are distributed evenly between bottom and top. After some rounds it is the middle of the integers instead, so that
    the search always ends."""
    middle = (bottom | top) - ((bottom ^ top) >> 1)
    share = (not_below - wanted).to(tl.float32) / ((not_below - above) * 1.0)
    share = tl.minimum(tl.maximum(share, 0.02), 0.98)
    guess = ordered(number(bottom) + (number(top) - number(bottom)) * share)
    return tl.minimum(tl.maximum(tl.where(turn < _GUESSES, guess, middle), bottom + 1), top)


@triton.jit
def narrow(bottom, top, not_below, above, guess, enough, least_wanted, most_wanted):
    """Narrow the range of the least chosen score by one guess; `enough` scores are at or above the guess. Returns the
    range, how many scores are at or above its bottom, and how many are above its top. The range becomes one integer as
    soon as the number of scores lies between least_wanted and most_wanted."""
    is_enough = enough >= least_wanted
    new_top = tl.where(is_enough, tl.where(enough <= most_wanted, guess, top), guess - 1)
    return tl.where(is_enough, guess, bottom), new_top, tl.where(is_enough, enough, not_below), tl.where(
        is_enough, above, enough)


@triton.jit
def _taken(bottom, not_below, above, top_k):
    """Return the result of `least_chosen` once the range is one integer. If exactly top_k scores are at or above that
    integer, all of them are chosen. Otherwise the integer is a score itself: `above` scores are greater, and some of
    those equal to it are chosen too."""
    is_apart = not_below == top_k
    return tl.where(is_apart, bottom - 1, bottom), tl.where(is_apart, 0, top_k - above)


@triton.jit
def load_orders(own, start, low, high, SIZE: tl.constexpr):
    """Load (positions, whether they are visible, ordered scores). An invisible position has the least integer as its
    score."""
    position = start + tl.arange(0, SIZE)
    is_visible = (position >= low) & (position < high)
    is_near = position < tl.cdiv(high, ALIGNED) * ALIGNED  # whole groups, as wide loads need
    order = ordered(tl.load(own + position, mask=is_near, other=0.0))
    return position, is_visible, tl.where(is_visible, order, LEAST)


@triton.jit
def _ends_and_sums(top, bottom, total, squares, other_top, other_bottom, other_total, other_squares):
    return (tl.maximum(top, other_top), tl.minimum(bottom, other_bottom), total + other_total,
            squares + other_squares)


@triton.jit
def _ends_and_sum(top, bottom, total, other_top, other_bottom, other_total):
    return tl.maximum(top, other_top), tl.minimum(bottom, other_bottom), total + other_total


@triton.jit
def _end_of_normal(share):
    """Return about how many standard deviations above the mean the best `share` of normally distributed numbers
    begins."""
    t = tl.sqrt(-2.0 * tl.log(tl.minimum(share, 0.5)))
    return t - (2.30753 + 0.27061 * t) / (1.0 + t * (0.99229 + 0.04481 * t))


@triton.jit
def least_candidate(own, low, high, top_k, ROOM: tl.constexpr, SAMPLE: tl.constexpr):
    """Return the bound for candidates, as an ordered integer: judging by a sample, more than top_k and fewer than ROOM
    scores of a context are at or above it. The first guess assumes that scores are normally distributed."""
    place = tl.arange(0, SAMPLE)
    step = (high - low) // (SAMPLE // _RUN)
    begin = tl.cdiv(low + place // _RUN * step, _RUN) * _RUN  # whole runs, as wide loads need
    score = tl.load(own + begin + place % _RUN, mask=begin + _RUN <= high, other=0.0)
    order = ordered(score)
    share = tl.sqrt(top_k * (1.0 * ROOM)) / (high - low)
    wanted = share * SAMPLE
    least_wanted = (0.92 * wanted).to(tl.int32)
    most_wanted = (1.2 * wanted).to(tl.int32)
    top, bottom, mean, square = tl.reduce((order, order, score / SAMPLE, score * score / SAMPLE), 0, _ends_and_sums)
    guess = ordered(mean + tl.sqrt(tl.maximum(square - mean * mean, 0.0)) * _end_of_normal(share))
    not_below, above, turn = SAMPLE, 0, 0
    while bottom < top:
        guess = tl.minimum(tl.maximum(guess, bottom + 1), top)
        enough = tl.sum((order >= guess).to(tl.int32), axis=0)
        bottom, top, not_below, above = narrow(bottom, top, not_below, above, guess, enough, least_wanted, most_wanted)
        guess = guess_between(bottom, top, not_below, above, wanted.to(tl.int32), turn)
        turn += 1
    return bottom


@triton.jit
def least_chosen(order, is_there, count, top_k):
    """Return (an ordered score; how many scores equal to it are chosen); all scores above it are chosen. `count`: the
    number of scores, more than top_k. `order` must be the least integer where `is_there` is not set. The first guess
    uses the mean, as if scores became rarer exponentially."""
    low_order = tl.where(is_there, order, GREATEST)
    top, bottom, total = tl.reduce((order, low_order, tl.where(is_there, number(order), 0.0)), 0, _ends_and_sum)
    beyond = total / count - number(bottom)
    guess = ordered(number(bottom) + beyond * tl.log((count * 1.0) / top_k))
    not_below, above, turn = count, 0, 0
    while bottom < top:
        guess = tl.minimum(tl.maximum(guess, bottom + 1), top)
        enough = tl.sum((order >= guess).to(tl.int32), axis=0)
        bottom, top, not_below, above = narrow(bottom, top, not_below, above, guess, enough, top_k, top_k)
        guess = guess_between(bottom, top, not_below, above, top_k, turn)
        turn += 1
    return _taken(bottom, not_below, above, top_k)


@triton.jit
def _count_in_memory(own, low, high, least, SEG: tl.constexpr):
    found = tl.zeros([SEG], dtype=tl.int32)
    for start in tl.range(low // ALIGNED * ALIGNED, high, SEG, num_stages=3):
        position, is_visible, order = load_orders(own, start, low, high, SEG)
        found += (is_visible & (order >= least)).to(tl.int32)
    return tl.sum(found, axis=0)


@triton.jit
def count_kinds(own, begin, end, low, high, least, SEG: tl.constexpr):
    """Count the visible scores of positions [begin, end), whole segments: (those above the least chosen score, those
    equal to it)."""
    above, equal = tl.zeros([SEG], dtype=tl.int32), tl.zeros([SEG], dtype=tl.int32)
    for start in tl.range(begin, end, SEG, num_stages=3):
        position, is_visible, order = load_orders(own, start, low, high, SEG)
        above += (is_visible & (order > least)).to(tl.int32)
        equal += (is_visible & (order == least)).to(tl.int32)
    return tl.sum(above, axis=0), tl.sum(equal, axis=0)


@triton.jit
def least_chosen_in_memory(own, low, high, top_k, SEG: tl.constexpr):
    """Do what `least_chosen` does, over all scores of a context, read from memory."""
    tops, bottoms = tl.full([SEG], LEAST, dtype=tl.int32), tl.full([SEG], GREATEST, dtype=tl.int32)
    for start in tl.range(low // ALIGNED * ALIGNED, high, SEG, num_stages=3):
        position, is_visible, order = load_orders(own, start, low, high, SEG)
        tops = tl.maximum(tops, order)
        bottoms = tl.minimum(bottoms, tl.where(is_visible, order, GREATEST))
    top, bottom = tl.max(tops, axis=0), tl.min(bottoms, axis=0)
    not_below, above, turn = high - low, 0, 0
    while bottom < top:
        guess = guess_between(bottom, top, not_below, above, top_k, turn)
        enough = _count_in_memory(own, low, high, guess, SEG)
        bottom, top, not_below, above = narrow(bottom, top, not_below, above, guess, enough, top_k, top_k)
        turn += 1
    return _taken(bottom, not_below, above, top_k)


@triton.jit
def write_chosen(to, position, is_there, order, least, missing, above_before, equal_before, top_k):
    """Write those of these positions that are chosen, ascending. `above_before` and `equal_before` say how many earlier
    positions had scores above and equal to the least chosen score. Returns both counts with these positions added.
    There are fewer than 32768 positions."""
    is_above, is_equal = is_there & (order > least), is_there & (order == least)
    both = is_above.to(tl.int32) * 65536 + is_equal.to(tl.int32)
    so_far = tl.cumsum(both, axis=0)
    num_equal = equal_before + (so_far & 65535)
    is_chosen = is_above | (is_equal & (num_equal <= missing))
    place = above_before + (so_far >> 16) + tl.minimum(num_equal, missing) - 1
    tl.store(to + place, position, mask=is_chosen & (place < top_k))
    total = tl.sum(both, axis=0)
    return above_before + (total >> 16), equal_before + (total & 65535)


@triton.jit
def needs_list(low, high, ROOM: tl.constexpr):
    """Whether a context has more positions than there is room for candidates."""
    return high - low // ALIGNED * ALIGNED > ROOM


@triton.jit
def list_candidates(at, place, position, order, is_candidate, ROOM: tl.constexpr):
    """Append candidates to a list: their ordered scores first, then their positions, with equal room for both."""
    is_kept = is_candidate & (place < ROOM)
    tl.store(at + place, order, mask=is_kept)
    tl.store(at + ROOM + place, position, mask=is_kept)


@triton.jit
def load_listed(at, start, count, ROOM: tl.constexpr, SIZE: tl.constexpr):
    """Load entries of a list: (positions, whether they exist, their ordered scores or the least integer)."""
    slot = start + tl.arange(0, SIZE)
    is_there = slot < count
    is_near = slot < tl.cdiv(count, ALIGNED) * ALIGNED  # whole groups, as wide loads need
    order = tl.where(is_there, tl.load(at + slot, mask=is_near, other=0), LEAST)
    return tl.load(at + ROOM + slot, mask=is_near, other=0), is_there, order


@triton.jit
def write_all(to, low, high, top_k, first, step, SEG: tl.constexpr):
    """Write every position of a context, for contexts that need no choice: from index `first` of the result on in
    steps, then NOT_CHOSEN in the remaining entries."""
    for start in range(first, top_k, step):
        place = start + tl.arange(0, SEG)
        tl.store(to + place, tl.where(low + place < high, low + place, NONE), mask=place < top_k)
