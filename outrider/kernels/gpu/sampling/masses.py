"""Probability masses of scaled logits, and their sums over a logit row; bit for bit those of `sample/filters.py`.

A scaled logit is at most 0. Its *distance* from the greatest one is the bit pattern of its absolute value, an integer
that grows with it. Kernels compare distances, search among them, and sum the weights of the tokens within a distance. A
*weight* is a mass for top-p and 1 for top-k. Weights are integers, so their sums do not depend on the order of
addition.
"""

from __future__ import annotations

import triton
import triton.language as tl

INFINITE = tl.constexpr(0x7F800000)  # the distance of a scaled logit of -inf
UNKNOWN = tl.constexpr(0x7FFFFFFF)  # further than any scaled logit
PIVOTS = 4  # distances that one pass over a logit row weighs
SLACK = tl.constexpr(1e-4)  # of all masses: what nearly known weights decide lies further from the limit


@triton.jit
def probability_mass(scaled):
    """exp(scaled), scaled <= 0, in units of 2^-40, as int64. Needs a kernel without fusion: the product and the sums
    are those of `sample.filters.probability_mass`, each rounded by itself."""
    power = tl.maximum(scaled * 1.4426950216293335, -64.0)
    whole = tl.floor(power)
    rest = power - whole
    value = rest * 0.0002161380834877491 + 0.0012467376654967666
    value = value * rest + 0.009675532579421997
    value = value * rest + 0.05548521876335144
    value = value * rest + 0.24022932350635529
    value = value * rest + 0.6931470632553101
    value = value * rest + 1.0
    mantissa = (value * 8388608.0).to(tl.int32).to(tl.int64)  # 23 bits, exactly; a card is slow to make 64 of a float
    return (mantissa << 17) >> tl.minimum(-whole, 63.0).to(tl.int32).to(tl.int64)


@triton.jit
def distance_of(scaled):
    return tl.abs(scaled).to(tl.int32, bitcast=True)


@triton.jit
def scaled_at(distance):
    """Return the scaled logit at this distance from the greatest one."""
    return -(distance.to(tl.float32, bitcast=True))


@triton.jit
def scaled_logits(own, token, valid, shift, temperature, floor):
    """Return scaled logits; -inf for tokens that min-p drops."""
    logit = tl.load(own + token, mask=valid, other=float("-inf"))
    scaled = tl.div_rn(logit - shift, temperature)
    return tl.where(scaled >= floor, scaled, float("-inf"))


@triton.jit
def weights_within(
    own, first, last, vocab, shift, temperature, floor, is_mass, pivot0, pivot1, pivot2, pivot3, SIZE: tl.constexpr,
    ABOUT: tl.constexpr = False,
):
    """Return (weight of all tokens, weights of those strictly nearer than each pivot), for tiles [first, last).

    ABOUT: takes half of the time, and returns bits for `weight_of_bits`: float32 sums with the hardware's exponential.
    A mass is off by less than 5e-6 of itself or 2^-40, a row's sum by less than 2e-5 of all masses; counts of tokens
    are exact.
    """
    total = tl.zeros([SIZE], dtype=tl.float32 if ABOUT else tl.int64)
    sum0, sum1, sum2, sum3 = total, total, total, total
    for tile in range(first, last):
        token = tile * SIZE + tl.arange(0, SIZE)
        scaled = scaled_logits(own, token, token < vocab, shift, temperature, floor)
        distance = distance_of(scaled)
        mass = tl.exp2(scaled * 1.4426950408889634) if ABOUT else probability_mass(scaled)
        weight = tl.where(is_mass, mass, 1)
        total += weight
        sum0 += tl.where(distance < pivot0, weight, 0)
        sum1 += tl.where(distance < pivot1, weight, 0)
        sum2 += tl.where(distance < pivot2, weight, 0)
        sum3 += tl.where(distance < pivot3, weight, 0)
    return _sum(total, ABOUT), _sum(sum0, ABOUT), _sum(sum1, ABOUT), _sum(sum2, ABOUT), _sum(sum3, ABOUT)


@triton.jit
def _sum(weight, ABOUT: tl.constexpr):
    """Return a sum of weights as it is stored: the bits of a float64, or an integer."""
    if ABOUT:
        return tl.sum(weight, axis=0).to(tl.float64).to(tl.int64, bitcast=True)
    else:
        return tl.sum(weight, axis=0)


@triton.jit
def weight_of_bits(bits):
    return bits.to(tl.float64, bitcast=True)


@triton.jit
def narrowed(inside, outside, pivot, weight, limit, slack):
    """Narrow the search after one more pivot was weighed: returns (greatest distance known to be kept, least known not
    to be). A token is kept if the tokens nearer than it weigh less than the limit. Within the slack of the limit
    nothing is decided."""
    weight = weight.to(tl.float64)
    return (tl.where(weight < limit - slack, tl.maximum(inside, pivot), inside),
            tl.where(weight >= limit + slack, tl.minimum(outside, pivot), outside))


@triton.jit
def furthest_kept(own, num_tiles, vocab, shift, temperature, floor, is_mass, limit, inside, outside,
                  SIZE: tl.constexpr):
    """Return the greatest distance that is kept, between one that is kept and one that is not. Reads the row about ten
    times."""
    while outside - inside > 1:
        step = tl.maximum((outside - inside) // 5, 1)
        pivot0, pivot1 = inside + step, tl.minimum(inside + 2 * step, outside)
        pivot2, pivot3 = tl.minimum(inside + 3 * step, outside), tl.minimum(inside + 4 * step, outside)
        _, sum0, sum1, sum2, sum3 = weights_within(
            own, 0, num_tiles, vocab, shift, temperature, floor, is_mass, pivot0, pivot1, pivot2, pivot3, SIZE
        )
        inside, outside = narrowed(inside, outside, pivot0, sum0, limit, 0.0)
        inside, outside = narrowed(inside, outside, pivot1, sum1, limit, 0.0)
        inside, outside = narrowed(inside, outside, pivot2, sum2, limit, 0.0)
        inside, outside = narrowed(inside, outside, pivot3, sum3, limit, 0.0)
    return inside
