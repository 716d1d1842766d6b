"""Thresholds of top-k, top-p and min-p, without a sort. `sample/filters.py` is the specification, to the bit.

    scaled logits of a row, likeliest first      0 ........................................ -inf
    0. a bound below which no threshold lies     k tiles have a logit that reaches the k-th greatest of their maxima
    1. a histogram over bins of scaled logits    counts for top-k, probability masses for top-p
    2. the bin that each threshold lies in       from running sums over the bins
    3. where those bins hold too many logits     1 and 2 once more, over fine bins inside them: flat distributions
    4. the logits of the bins are collected      a few hundred, or a few thousand, of them
    5. a search by bisection among those

Masses are integers (`probability_mass`), so that sums do not depend on their order. Two passes over the logits, of
which few reach the bound, and tiles that have none are not read; rows that ask for neither top-k nor top-p take part in
none, and rows whose bins hold few logits in no pass over fine bins. Where more logits are collected than there is room
for (thousands of equal ones), the search reads the whole row instead: slow, and right.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

import triton
import triton.language as tl
from outrider.kernels import sampling_flags as flags
from outrider.kernels.triton.common import (
    pdl_options,
    release_dependents,
    require_tensor,
    uses_pdl,
    wait_for_inputs,
)
from outrider.kernels.triton.launch import kernel
from outrider.kernels.triton.logprobs import nth_greatest
from outrider.kernels.triton.sampling import SLICES, TILE, Spans, own_logits, shift_of

_TOP_K, _TOP_P = tl.constexpr(flags.TOP_K), tl.constexpr(flags.TOP_P)
_SEARCHED, _FILTERED = tl.constexpr(flags.SEARCHED), tl.constexpr(flags.FILTERED)

# Bins of a scaled logit -a: 64 to a unit up to a = 16, then 128 to an octave.
_BINS = tl.constexpr(2048)
_LINEAR_BINS, _PER_UNIT, _LINEAR_END = tl.constexpr(1024), tl.constexpr(64.0), tl.constexpr(16.0)
_LINEAR_END_BITS = tl.constexpr(0x41800000 >> 16)

_CANDIDATES = 8192  # logits that are collected for one logit row
_SEARCH_TILE = 1024


class FilterRows(NamedTuple):
    """Fields of every row that filters read, [rows]."""

    flags: torch.Tensor  # int64
    temperature: torch.Tensor  # float32
    top_k: torch.Tensor  # int64
    top_p: torch.Tensor  # float32
    min_p_floor: torch.Tensor  # float32: log of min_p, -inf where there is none


class _Scratch(NamedTuple):
    counts: torch.Tensor  # [logit rows, bins] int32
    masses: torch.Tensor  # [logit rows, bins] int64
    num_candidates: torch.Tensor  # [logit rows] int32
    candidates: torch.Tensor  # [logit rows, room] float32: scaled logits
    bins: torch.Tensor  # [logit rows, 3] int32: of top-k (-1: none), first and last that top-p may lie in
    bounds: torch.Tensor  # [logit rows] float32: no threshold of top-k or top-p is a lower scaled logit
    above: torch.Tensor  # [logit rows, 3] int64: count above top-k's bin, mass above it, mass above top-p's first
    fine: torch.Tensor  # [logit rows, 2] int32: first and last coarse bin that fine bins divide; -1: bins are coarse
    furthest: torch.Tensor  # [logit rows] float32: greatest distance that was counted
    outside: torch.Tensor  # [logit rows, 3] int64: count and mass above those coarse bins, mass below them


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
    mantissa = (value * 8388608.0).to(tl.int64)  # 23 bits, exactly
    return (mantissa << 17) >> tl.minimum(-whole, 63.0).to(tl.int64)


@triton.jit
def _bin_of(distance):
    """The bin of a scaled logit at this distance (>= 0) from the greatest. Never decreases with the distance."""
    near = (tl.minimum(distance, _LINEAR_END) * _PER_UNIT).to(tl.int32)
    far = (distance.to(tl.int32, bitcast=True) >> 16) - _LINEAR_END_BITS + _LINEAR_BINS
    return tl.where(distance < _LINEAR_END, near, tl.minimum(far, _BINS - 1))


@triton.jit
def _edge_of(bin):
    """The least distance of a coarse bin."""
    far = (((bin - _LINEAR_BINS + _LINEAR_END_BITS) << 16) & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    return tl.where(bin <= _LINEAR_BINS, bin.to(tl.float32) / _PER_UNIT, far)


@triton.jit
def _fine_bin_of(distance, first, last, furthest, BINS: tl.constexpr):
    """The bin among equal parts of coarse bins `first` to `last`, which end at the furthest logit if that comes first;
    -1 before them and BINS after them. Never decreases with the distance."""
    coarse = _bin_of(distance)
    start = _edge_of(first)
    width = tl.maximum(tl.minimum(_edge_of(last + 1), furthest) - start, 1e-30)
    part = tl.minimum(tl.div_rn(distance - start, width) * BINS, BINS - 1.0)
    fine = tl.where(coarse < first, -1, tl.maximum(part, 0.0).to(tl.int32))
    return tl.where(coarse > last, BINS, fine)


@triton.jit
def _scaled_tile(own, token, valid, shift, heat, floor):
    """Scaled logits, -inf where min-p leaves none."""
    logit = tl.load(own + token, mask=valid, other=float("-inf"))
    scaled = tl.div_rn(logit - shift, heat)
    return tl.where(scaled >= floor, scaled, float("-inf"))


@triton.jit
def _bound_of(flag, top_k, top_p, tile_greatest, num_tiles, vocab, shift, heat, TILES: tl.constexpr):
    """A scaled logit that no threshold is below. Top-k: k tiles hold a logit that reaches the k-th greatest of their
    maxima. Top-p alone: all logits below the bound together have less than half of the mass 1 - p leaves out, as the
    greatest alone has mass 1."""
    bound = tl.log((1.0 - top_p) / (2.0 * vocab))
    if (flag & _TOP_K) != 0:
        bound = float("-inf")
        if top_k <= num_tiles:
            bound = tl.div_rn(nth_greatest(tile_greatest, top_k, num_tiles, TILES) - shift, heat)
    return bound


@kernel(do_not_specialize=["num_spans"], do_not_specialize_on_alignment=SLICES)
def _prepare_kernel(
    row, rows, thresholds, span_greatest, tile_greatest, scratch, num_spans, num_tiles, vocab, BINS: tl.constexpr,
    SPANS: tl.constexpr, PDL: tl.constexpr,
):
    """Clears a logit row's histograms and finds its bound."""
    release_dependents(PDL)
    wait_for_inputs(PDL)
    at = tl.program_id(0).to(tl.int64)
    of = tl.load(row + at)
    flag = tl.load(rows.flags + of)
    if (flag & _FILTERED) != 0:
        tl.store(thresholds + at, tl.load(rows.min_p_floor + of))
    if (flag & _SEARCHED) != 0:
        bins = at * BINS + tl.arange(0, BINS)
        tl.store(scratch.counts + bins, tl.zeros([BINS], dtype=tl.int32))
        tl.store(scratch.masses + bins, tl.zeros([BINS], dtype=tl.int64))
        tl.store(scratch.num_candidates + at, 0)
        tl.store(scratch.furthest + at, 0.0)
        shift = shift_of(span_greatest + at * num_spans, num_spans, SPANS)
        bound = _bound_of(
            flag, tl.load(rows.top_k + of), tl.load(rows.top_p + of), tile_greatest + at * num_tiles, num_tiles, vocab,
            shift, tl.load(rows.temperature + of), SPANS,
        )
        tl.store(scratch.bounds + at, bound)


@triton.jit
def _reaches(tile_greatest, tile, flag, shift, heat, bound):
    """Whether some logit of a tile may reach the bound. Top-p alone needs the masses of all of them."""
    top = tl.load(tile_greatest + tile, mask=(flag & _TOP_K) != 0, other=float("inf"))
    return tl.div_rn(top - shift, heat) >= bound


@kernel(do_not_specialize=["span"], do_not_specialize_on_alignment=SLICES)
def _histogram_kernel(
    logits, edited, row, rows, span_greatest, tile_greatest, scratch, logit_stride, edited_stride, vocab, num_tiles,
    span, BINS: tl.constexpr, SIZE: tl.constexpr, SPANS: tl.constexpr, FINE: tl.constexpr, PDL: tl.constexpr,
):
    """Counts and masses of a span's logits by bin; with FINE by fine bins, of the rows that need them."""
    release_dependents(PDL)
    wait_for_inputs(PDL)
    at = tl.program_id(1).to(tl.int64)
    of = tl.load(row + at)
    flag = tl.load(rows.flags + of)
    takes_part = (flag & _SEARCHED) != 0
    coarse_first = 0
    if FINE:
        coarse_first = tl.load(scratch.fine + 2 * at, mask=takes_part, other=-1)
        takes_part = coarse_first >= 0
    if takes_part:
        coarse_last, furthest = 0, 0.0
        if FINE:
            coarse_last, furthest = tl.load(scratch.fine + 2 * at + 1), tl.load(scratch.furthest + at)
        num_spans = tl.num_programs(0)
        own = own_logits(logits, edited, at, logit_stride, edited_stride, flag)
        shift = shift_of(span_greatest + at * num_spans, num_spans, SPANS)
        heat, floor = tl.load(rows.temperature + of), tl.load(rows.min_p_floor + of)
        bound, tile_greatest = tl.load(scratch.bounds + at), tile_greatest + at * num_tiles
        rest = tl.zeros([SIZE], dtype=tl.int64)  # mass below the bound
        distant = tl.zeros([SIZE], dtype=tl.float32)
        first = tl.program_id(0) * span
        for tile in range(first, tl.minimum(first + span, num_tiles)):
            if _reaches(tile_greatest, tile, flag, shift, heat, bound):
                token = tile * SIZE + tl.arange(0, SIZE)
                scaled = _scaled_tile(own, token, token < vocab, shift, heat, floor)
                counts = (scaled > float("-inf")) & (scaled >= bound)
                if FINE:
                    bin = _fine_bin_of(tl.abs(scaled), coarse_first, coarse_last, furthest, BINS)
                    counts = counts & (bin >= 0) & (bin < BINS)
                    at_bin = at * BINS + bin
                else:
                    at_bin = at * BINS + _bin_of(tl.abs(scaled))
                    distant = tl.maximum(distant, tl.where(counts, tl.abs(scaled), 0.0))
                if (flag & _TOP_K) != 0:
                    tl.atomic_add(scratch.counts + at_bin, 1, mask=counts, sem="relaxed")
                if (flag & _TOP_P) != 0:
                    mass = probability_mass(scaled)
                    tl.atomic_add(scratch.masses + at_bin, mass, mask=counts & (mass > 0), sem="relaxed")
                    rest += tl.where(counts, 0, mass)
        if not FINE:
            tl.atomic_max(scratch.furthest + at, tl.max(distant, axis=0), sem="relaxed")
        if ((flag & _SEARCHED) == _TOP_P) & (not FINE):  # what top-k leaves out has no mass
            tl.atomic_add(scratch.masses + at * BINS + BINS - 1, tl.sum(rest, axis=0), sem="relaxed")


@kernel(do_not_specialize_on_alignment=SLICES)
def _bins_kernel(row, rows, scratch, ROOM: tl.constexpr, BINS: tl.constexpr, FINE: tl.constexpr, PDL: tl.constexpr):
    """The bins that the thresholds of one logit row lie in; without FINE also whether fine bins are needed.

    The mass that top-k leaves is known up to the bin of its threshold, so top-p's threshold lies in one of the bins
    that the least and the most of it lead to."""
    release_dependents(PDL)
    wait_for_inputs(PDL)
    at = tl.program_id(0).to(tl.int64)
    of = tl.load(row + at)
    flag = tl.load(rows.flags + of)
    takes_part = (flag & _SEARCHED) != 0
    if FINE:
        takes_part = tl.load(scratch.fine + 2 * at, mask=takes_part, other=-1) >= 0
    if takes_part:
        bin = tl.arange(0, BINS)
        top_k = tl.load(rows.top_k + of)
        count = tl.load(scratch.counts + at * BINS + bin)
        mass = tl.load(scratch.masses + at * BINS + bin)
        count_above = tl.zeros([], dtype=tl.int64)
        mass_above = tl.zeros([], dtype=tl.int64)
        mass_below = tl.zeros([], dtype=tl.int64)
        if FINE:
            is_cut = tl.load(scratch.bins + 3 * at) >= 0
            count_above = tl.load(scratch.outside + 3 * at)
            mass_above = tl.load(scratch.outside + 3 * at + 1)
            mass_below = tl.load(scratch.outside + 3 * at + 2)
        else:
            is_cut = top_k <= tl.sum(count, axis=0)  # counted are those that reach the bound, as the k greatest do
            is_cut = is_cut & ((flag & _TOP_K) != 0)
        upto = tl.cumsum(count, axis=0) + count_above
        k_bin = tl.where(is_cut, tl.sum((upto < top_k).to(tl.int32), axis=0), BINS)
        before = tl.cumsum(mass, axis=0) - mass + mass_above
        beyond = tl.where(is_cut, 0, mass_below)
        least = tl.sum(tl.where(bin < k_bin, mass, 0), axis=0) + mass_above + beyond
        most = tl.sum(tl.where(bin <= k_bin, mass, 0), axis=0) + mass_above + beyond
        top_p = tl.load(rows.top_p + of).to(tl.float64)
        reached = before.to(tl.float64)
        first = tl.max(tl.where((mass > 0) & (reached < least.to(tl.float64) * top_p), bin, 0), axis=0)
        last = tl.max(tl.where((mass > 0) & (reached < most.to(tl.float64) * top_p), bin, 0), axis=0)
        last = tl.where((flag & _TOP_P) != 0, last, -1)
        tl.store(scratch.bins + 3 * at, tl.where(is_cut, k_bin, -1))
        tl.store(scratch.bins + 3 * at + 1, first)
        tl.store(scratch.bins + 3 * at + 2, last)
        tl.store(scratch.above + 3 * at, tl.sum(tl.where(bin < k_bin, count, 0), axis=0).to(tl.int64) + count_above)
        tl.store(scratch.above + 3 * at + 1, least)
        tl.store(scratch.above + 3 * at + 2, tl.sum(tl.where(bin < first, mass, 0), axis=0) + mass_above)
        if not FINE:
            low = tl.minimum(tl.where(is_cut, k_bin, BINS), tl.where(last >= first, first, BINS))
            high = tl.maximum(tl.where(is_cut, k_bin, -1), last)
            is_chosen = (bin >= low) & (bin <= high)
            # A mass over the least mass of a logit in its bin is at least the number of its logits.
            least_mass = tl.exp(-_edge_of(bin + 1)) * 1.0995116e12
            number = tl.maximum(tl.where(mass > 0, mass.to(tl.float32) / least_mass, 0.0), count.to(tl.float32))
            is_many = (high >= low) & (tl.sum(tl.where(is_chosen, number, 0.0), axis=0) > ROOM)
            tl.store(scratch.fine + 2 * at, tl.where(is_many, low, -1))
            tl.store(scratch.fine + 2 * at + 1, high)
            if is_many:
                tl.store(scratch.outside + 3 * at, tl.sum(tl.where(bin < low, count, 0), axis=0).to(tl.int64))
                tl.store(scratch.outside + 3 * at + 1, tl.sum(tl.where(bin < low, mass, 0), axis=0))
                tl.store(scratch.outside + 3 * at + 2, tl.sum(tl.where(bin > high, mass, 0), axis=0))
                tl.store(scratch.counts + at * BINS + bin, tl.zeros([BINS], dtype=tl.int32))
                tl.store(scratch.masses + at * BINS + bin, tl.zeros([BINS], dtype=tl.int64))


@triton.jit
def _bin_in(distance, first, last, furthest, BINS: tl.constexpr):
    """The bin of a scaled logit in the histogram that the row's thresholds were found in."""
    if first >= 0:
        bin = _fine_bin_of(distance, first, last, furthest, BINS)
    else:
        bin = _bin_of(distance)
    return bin


@kernel(do_not_specialize=["span"], do_not_specialize_on_alignment=SLICES)
def _collect_kernel(
    logits, edited, row, rows, span_greatest, tile_greatest, scratch, logit_stride, edited_stride, vocab, num_tiles,
    span, ROOM: tl.constexpr, BINS: tl.constexpr, SIZE: tl.constexpr, SPANS: tl.constexpr, PDL: tl.constexpr,
):
    """In any order: what is searched for does not depend on it."""
    release_dependents(PDL)
    wait_for_inputs(PDL)
    at = tl.program_id(1).to(tl.int64)
    of = tl.load(row + at)
    flag = tl.load(rows.flags + of)
    if (flag & _SEARCHED) != 0:
        num_spans = tl.num_programs(0)
        own = own_logits(logits, edited, at, logit_stride, edited_stride, flag)
        shift = shift_of(span_greatest + at * num_spans, num_spans, SPANS)
        heat, floor = tl.load(rows.temperature + of), tl.load(rows.min_p_floor + of)
        k_bin = tl.load(scratch.bins + 3 * at)
        p_first, p_last = tl.load(scratch.bins + 3 * at + 1), tl.load(scratch.bins + 3 * at + 2)
        coarse_first, coarse_last = tl.load(scratch.fine + 2 * at), tl.load(scratch.fine + 2 * at + 1)
        furthest = tl.load(scratch.furthest + at)
        bound, tile_greatest = tl.load(scratch.bounds + at), tile_greatest + at * num_tiles
        first = tl.program_id(0) * span
        for tile in range(first, tl.minimum(first + span, num_tiles)):
            if _reaches(tile_greatest, tile, flag, shift, heat, bound):
                token = tile * SIZE + tl.arange(0, SIZE)
                scaled = _scaled_tile(own, token, token < vocab, shift, heat, floor)
                bin = _bin_in(tl.abs(scaled), coarse_first, coarse_last, furthest, BINS)
                is_in = (bin == k_bin) | ((bin >= p_first) & (bin <= p_last))
                is_in = is_in & (scaled > float("-inf")) & (scaled >= bound)
                found = tl.sum(is_in.to(tl.int32), axis=0)
                if found > 0:
                    place = tl.atomic_add(scratch.num_candidates + at, found, sem="relaxed")
                    place += tl.cumsum(is_in.to(tl.int32), axis=0) - 1
                    tl.store(scratch.candidates + at * ROOM + place, scaled, mask=is_in & (place < ROOM))


@triton.jit
def _keys_tile(
    candidates, own, first, size, is_short, shift, heat, floor, low_bin, high_bin, fine_first, fine_last, furthest,
    BINS: tl.constexpr, SIZE: tl.constexpr,
):
    """(scaled logits, their distances from the greatest as ordered integers, which lie in the bins)"""
    index = first + tl.arange(0, SIZE)
    if is_short:
        scaled = tl.load(candidates + index, mask=index < size, other=float("-inf"))
    else:
        scaled = _scaled_tile(own, index, index < size, shift, heat, floor)
    distance = tl.abs(scaled)
    bin = _bin_in(distance, fine_first, fine_last, furthest, BINS)
    is_in = (scaled > float("-inf")) & (bin >= low_bin) & (bin <= high_bin)
    return scaled, distance.to(tl.int32, bitcast=True), is_in


@triton.jit
def _sum_up_to(
    key, candidates, own, size, is_short, shift, heat, floor, low_bin, high_bin, fine_first, fine_last, furthest,
    BINS: tl.constexpr, SIZE: tl.constexpr,
):
    """(how many, their mass) of the logits in the bins whose distance is at most `key`."""
    count = tl.zeros([SIZE], dtype=tl.int32)
    mass = tl.zeros([SIZE], dtype=tl.int64)
    for first in range(0, size, SIZE):
        scaled, keys, is_in = _keys_tile(
            candidates, own, first, size, is_short, shift, heat, floor, low_bin, high_bin,
            fine_first, fine_last, furthest, BINS,
            SIZE,
        )
        is_in = is_in & (keys <= key)
        count += is_in.to(tl.int32)
        mass += tl.where(is_in, probability_mass(scaled), 0)
    return tl.sum(count, axis=0), tl.sum(mass, axis=0)


@triton.jit
def _key_range(
    candidates, own, size, is_short, shift, heat, floor, low_bin, high_bin,
    fine_first, fine_last, furthest, BINS: tl.constexpr,
    SIZE: tl.constexpr,
):
    least = tl.full([SIZE], 0x7F800000, dtype=tl.int32)
    most = tl.zeros([SIZE], dtype=tl.int32)
    for first in range(0, size, SIZE):
        _, keys, is_in = _keys_tile(
            candidates, own, first, size, is_short, shift, heat, floor, low_bin, high_bin,
            fine_first, fine_last, furthest, BINS,
            SIZE,
        )
        least = tl.minimum(least, tl.where(is_in, keys, 0x7F800000))
        most = tl.maximum(most, tl.where(is_in, keys, 0))
    return tl.min(least, axis=0), tl.max(most, axis=0)


@kernel(do_not_specialize=["num_spans"], do_not_specialize_on_alignment=SLICES)
def _search_kernel(
    logits, edited, row, rows, span_greatest, scratch, thresholds, logit_stride, edited_stride, vocab, num_spans,
    ROOM: tl.constexpr, BINS: tl.constexpr, SIZE: tl.constexpr, SPANS: tl.constexpr, PDL: tl.constexpr,
):
    """One program finds the thresholds of one logit row, and keeps the higher of them."""
    release_dependents(PDL)
    wait_for_inputs(PDL)
    at = tl.program_id(0).to(tl.int64)
    of = tl.load(row + at)
    flag = tl.load(rows.flags + of)
    if (flag & _SEARCHED) != 0:
        own = own_logits(logits, edited, at, logit_stride, edited_stride, flag)
        shift = shift_of(span_greatest + at * num_spans, num_spans, SPANS)
        heat, floor = tl.load(rows.temperature + of), tl.load(rows.min_p_floor + of)
        candidates = scratch.candidates + at * ROOM
        fine_first, fine_last = tl.load(scratch.fine + 2 * at), tl.load(scratch.fine + 2 * at + 1)
        furthest = tl.load(scratch.furthest + at)
        found = tl.load(scratch.num_candidates + at)
        is_short = found <= ROOM
        size = tl.where(is_short, found, vocab)
        threshold = floor
        k_bin = tl.load(scratch.bins + 3 * at)
        total = tl.load(scratch.above + 3 * at + 1)
        if k_bin >= 0:
            # The least key that enough logits do not exceed. Fewer than enough are at or below `low`.
            enough = tl.load(rows.top_k + of) - tl.load(scratch.above + 3 * at)
            low, high = _key_range(
                candidates, own, size, is_short, shift, heat, floor, k_bin, k_bin,
                fine_first, fine_last, furthest, BINS, SIZE
            )
            low -= 1
            while high - low > 1:
                middle = low + (high - low) // 2
                count, _ = _sum_up_to(
                    middle, candidates, own, size, is_short, shift, heat, floor, k_bin, k_bin,
                    fine_first, fine_last, furthest,
                    BINS, SIZE,
                )
                high = tl.where(count >= enough, middle, high)
                low = tl.where(count >= enough, low, middle)
            _, mass = _sum_up_to(
                high, candidates, own, size, is_short, shift, heat, floor, k_bin, k_bin,
                fine_first, fine_last, furthest, BINS,
                SIZE,
            )
            total += mass
            threshold = tl.maximum(threshold, -high.to(tl.float32, bitcast=True))
        p_first, p_last = tl.load(scratch.bins + 3 * at + 1), tl.load(scratch.bins + 3 * at + 2)
        if p_last >= p_first:
            # The greatest key before which the mass stays below p. `low` is such a key, `high` is not.
            limit = total.to(tl.float64) * tl.load(rows.top_p + of).to(tl.float64)
            above = tl.load(scratch.above + 3 * at + 2)
            low, high = _key_range(
                candidates, own, size, is_short, shift, heat, floor, p_first, p_last,
                fine_first, fine_last, furthest, BINS, SIZE
            )
            high += 1
            while high - low > 1:
                middle = low + (high - low) // 2
                _, mass = _sum_up_to(
                    middle - 1, candidates, own, size, is_short, shift, heat, floor, p_first, p_last, fine_first,
                    fine_last, furthest, BINS, SIZE,
                )
                is_below = (above + mass).to(tl.float64) < limit
                low = tl.where(is_below, middle, low)
                high = tl.where(is_below, high, middle)
            threshold = tl.maximum(threshold, -low.to(tl.float32, bitcast=True))
        tl.store(thresholds + at, threshold)


def find_thresholds(
    logits: torch.Tensor, edited: torch.Tensor, row: torch.Tensor, rows: FilterRows, spans: Spans, *,
    any_searched: bool = True, pdl: bool | None = None,
) -> torch.Tensor:
    """[logit rows] float32: what scaled logits must reach to be drawn, in logit rows that ask for a filter. Other cells
    are not written. `edited` and `spans` are those of `edit_logits`. Without `any_searched` nobody asks for more than
    min-p."""
    name, device, (num, vocab) = "find_thresholds", logits.device, logits.shape
    require_tensor(name, "logits", logits, (None, None), device, (torch.float32,))
    require_tensor(name, "edited", edited, (num, vocab), device, (torch.float32,))
    require_tensor(name, "row", row, (num,), device, (torch.int64,))
    for field, tensor in zip(rows._fields, rows, strict=True):
        dtype = torch.int64 if field in ("flags", "top_k") else torch.float32
        require_tensor(name, f"rows.{field}", tensor, (rows.flags.shape[0],), device, (dtype,))

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    thresholds, bins, room = empty(num, dtype=torch.float32), _BINS.value, _CANDIDATES
    height = num if any_searched else 0
    scratch = _Scratch(
        empty(height, bins, dtype=torch.int32), empty(height, bins, dtype=torch.int64), empty(num, dtype=torch.int32),
        empty(height, room, dtype=torch.float32), empty(height, 3, dtype=torch.int32),
        empty(height, dtype=torch.float32), empty(height, 3, dtype=torch.int64), empty(height, 2, dtype=torch.int32),
        empty(height, dtype=torch.float32), empty(height, 3, dtype=torch.int64),
    )  # fmt: skip
    if num == 0:
        return thresholds
    pdl = uses_pdl(device) if pdl is None else pdl
    options = {"PDL": pdl, "enable_fp_fusion": False, **pdl_options(pdl)}
    greatest = (spans.greatest, spans.tile_greatest)
    _prepare_kernel[(num,)](
        row, rows, thresholds, *greatest, scratch, spans.grid[0], spans.num_tiles, vocab, BINS=bins, SPANS=spans.most,
        num_warps=4, **options,
    )
    if not any_searched:
        return thresholds
    common, sizes = (logits, edited, row, rows), (logits.stride(0), edited.stride(0), vocab)
    tiles = (*common, *greatest, scratch, *sizes, spans.num_tiles, spans.length)
    for fine in (False, True):
        _histogram_kernel[spans.grid](*tiles, BINS=bins, SIZE=TILE, SPANS=spans.most, FINE=fine, num_warps=4, **options)
        _bins_kernel[(num,)](row, rows, scratch, ROOM=room, BINS=bins, FINE=fine, num_warps=4, **options)
    _collect_kernel[spans.grid](
        *tiles, ROOM=room, BINS=bins, SIZE=TILE, SPANS=spans.most, num_warps=4, **options
    )
    _search_kernel[(num,)](
        *common, spans.greatest, scratch, thresholds, *sizes, spans.grid[0], ROOM=room, BINS=bins,
        SIZE=_SEARCH_TILE, SPANS=spans.most, num_warps=4, **options,
    )
    return thresholds
