"""Log-probabilities of chosen tokens and of the most likely tokens, for logit rows whose requests ask for them.

    1. find every tile's greatest logit and sum of exponentials, and the greatest logit of every group of tokens
    2. count ranks; collect the tokens that reach the n-th greatest group: the n most likely are among them
    3. take the n most likely from those, one after the other

On a GPU only this file adds exponentials of float32 logits, for sampled tokens and for prompt tokens. Tiles depend on
the vocabulary alone, and exponentials are added as integers: where a row begins in memory changes how the compiler lays
out a tile in registers, and sums of integers do not depend on that. Ties go to the lowest id. If more tokens are
collected than there is room for (many equal logits), the last kernel reads the whole row instead.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from outrider.kernels import sampling_flags as flags
from outrider.kernels.gpu.common import (
    cdiv,
    next_power_of_two,
    pdl_options,
    release_dependents,
    require,
    require_tensor,
    uses_pdl,
    wait_for_inputs,
)
from outrider.kernels.gpu.launch.triton_kernel import kernel
from outrider.kernels.gpu.sampling.draw import Spans, own_logits, plan_spans, shift_of
from outrider.kernels.reported_logprobs import ReportedLogprobs

_FILTERED = tl.constexpr(flags.FILTERED)
_NO_ID = tl.constexpr(2147483647)
_GROUPS = 256  # of tokens, at most
_TILES_PER_COUNT = 8
_ROOM = 1024  # tokens that are collected for one logit row
_TILE_UNIT = tl.constexpr(2.0**44)  # of the exponentials of a tile, which has at most 2^18 tokens
_ROW_UNIT = tl.constexpr(2.0**40)  # of a logit row's


class LogprobLogits(NamedTuple):
    """The logits whose log-probabilities are reported: the model's, or, if `processed`, those that tokens were drawn
    from."""

    logits: torch.Tensor  # [logit rows, vocabulary] float32
    edited: torch.Tensor  # the same shape; the logits themselves if raw
    row: torch.Tensor  # [logit rows] int64
    num_logprobs: torch.Tensor  # [rows] int64; below 0: none
    flags: torch.Tensor  # [rows] int64
    temperature: torch.Tensor  # [rows] float32
    thresholds: torch.Tensor  # [logit rows] float32
    greatest: torch.Tensor  # [logit rows, spans] float32


class _Scratch(NamedTuple):
    tile_greatest: torch.Tensor  # [logit rows, tiles] float32
    tile_sums: torch.Tensor  # [logit rows, tiles] int64: of exp(logit - greatest of the tile)
    group_greatest: torch.Tensor  # [logit rows, groups] float32
    greater: torch.Tensor  # [logit rows, counts] int32: tokens likelier than the chosen one
    num_candidates: torch.Tensor  # [logit rows] int32
    candidates: torch.Tensor  # [logit rows, room] int32: token ids


@triton.jit
def _shape_of(inputs, at, of, logit_stride, edited_stride, num_spans, PROCESSED: tl.constexpr, SPANS: tl.constexpr):
    """Return (the address of the logit row, what is subtracted from each logit, its divisor, and the least value it
    must reach)."""
    if PROCESSED:
        flag = tl.load(inputs.flags + of)
        own = own_logits(inputs.logits, inputs.edited, at, logit_stride, edited_stride, flag)
        temperature = tl.load(inputs.temperature + of)
        # The greatest logits of greedy logit rows were not looked for, and the shift changes no log-probability.
        shift = tl.where(temperature > 0, shift_of(inputs.greatest + at * num_spans, num_spans, SPANS), 0.0)
        threshold = tl.load(inputs.thresholds + at, mask=(flag & _FILTERED) != 0, other=float("-inf"))
        return own, shift, tl.where(temperature > 0, temperature, 1.0), threshold
    else:
        return inputs.logits + at * logit_stride, 0.0, 1.0, float("-inf")


@triton.jit
def _shaped(own, token, valid, shift, temperature, threshold, PROCESSED: tl.constexpr):
    logit = tl.load(own + token, mask=valid, other=float("-inf"))
    if PROCESSED:
        logit = tl.div_rn(logit - shift, temperature)
        logit = tl.where(logit < threshold, float("-inf"), logit)
    return logit


@kernel(do_not_specialize=["num_spans", "span"])
def _tiles_kernel(
    inputs, scratch, logit_stride, edited_stride, num_spans, vocab, num_tiles, span, SIZE: tl.constexpr,
    GROUP: tl.constexpr, PROCESSED: tl.constexpr, SPANS: tl.constexpr, PDL: tl.constexpr,
):
    release_dependents(PDL)
    wait_for_inputs(PDL)
    at, first = tl.program_id(1).to(tl.int64), tl.program_id(0) * span
    of = tl.load(inputs.row + at)
    if tl.load(inputs.num_logprobs + of) >= 0:
        own, shift, temperature, threshold = _shape_of(
            inputs, at, of, logit_stride, edited_stride, num_spans, PROCESSED, SPANS
        )
        for tile in range(first, tl.minimum(first + span, num_tiles)):
            token = tile * SIZE + tl.arange(0, SIZE)
            logit = _shaped(own, token, token < vocab, shift, temperature, threshold, PROCESSED)
            logit = tl.where(logit < float("inf"), logit, float("inf"))  # a NaN: the row has no log-probabilities
            groups = tl.max(tl.reshape(logit, [SIZE // GROUP, GROUP]), axis=1)
            greatest = tl.max(groups, axis=0)
            shifted = tl.where(tl.abs(greatest) < float("inf"), logit - greatest, float("-inf"))
            sums = tl.sum((tl.exp(shifted) * _TILE_UNIT).to(tl.int64), axis=0)
            tl.store(scratch.tile_greatest + at * num_tiles + tile, greatest)
            tl.store(scratch.tile_sums + at * num_tiles + tile, sums)
            group = tile * (SIZE // GROUP) + tl.arange(0, SIZE // GROUP)
            tl.store(scratch.group_greatest + at * num_tiles * (SIZE // GROUP) + group, groups)
        if first == 0:
            tl.store(scratch.num_candidates + at, 0)


@triton.jit
def nth_greatest(values, count, size, GROUPS: tl.constexpr):
    """Return the count-th greatest of values [size], which must have that many; +inf for a count of 0. It is found by
    bisection over integers that are in the same order as the values."""
    group = tl.arange(0, GROUPS)
    bits = tl.load(values + group, mask=group < size, other=float("-inf")).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    low, high = tl.min(order, axis=0).to(tl.int64), tl.max(order, axis=0).to(tl.int64) + 1
    while high - low > 1:  # as many reach the first, not as many the second
        middle = (low + high) >> 1
        is_low = tl.sum((order >= middle.to(tl.int32)).to(tl.int32), axis=0) >= count
        low, high = tl.where(is_low, middle, low), tl.where(is_low, high, middle)
    found = low.to(tl.int32)
    found = tl.where(found < 0, found ^ 0x7FFFFFFF, found).to(tl.float32, bitcast=True)
    return tl.where(count > 0, found, float("inf"))


@kernel(do_not_specialize=["num_spans"], do_not_specialize_on_alignment=["tokens"])
def _count_kernel(
    inputs, tokens, scratch, logit_stride, edited_stride, num_spans, num_groups, vocab, SIZE: tl.constexpr,
    TILES: tl.constexpr, ROOM: tl.constexpr, GROUPS: tl.constexpr, PROCESSED: tl.constexpr, SPANS: tl.constexpr,
    PDL: tl.constexpr,
):
    release_dependents(PDL)
    wait_for_inputs(PDL)
    at = tl.program_id(1).to(tl.int64)
    of = tl.load(inputs.row + at)
    wanted = tl.load(inputs.num_logprobs + of)
    if wanted >= 0:
        own, shift, temperature, threshold = _shape_of(
            inputs, at, of, logit_stride, edited_stride, num_spans, PROCESSED, SPANS
        )
        chosen = _shaped(own, tl.load(tokens + at), True, shift, temperature, threshold, PROCESSED)
        enough = nth_greatest(scratch.group_greatest + at * num_groups, wanted, num_groups, GROUPS)
        greater = tl.zeros([SIZE], dtype=tl.int32)
        for tile in range(tl.program_id(0) * TILES, tl.program_id(0) * TILES + TILES):
            token = tile * SIZE + tl.arange(0, SIZE)
            valid = token < vocab
            logit = _shaped(own, token, valid, shift, temperature, threshold, PROCESSED)
            greater += (logit > chosen).to(tl.int32)
            is_in = valid & (logit >= enough)
            found = tl.sum(is_in.to(tl.int32), axis=0)
            if found > 0:
                place = tl.atomic_add(scratch.num_candidates + at, found, sem="relaxed")
                place += tl.cumsum(is_in.to(tl.int32), axis=0) - 1
                tl.store(scratch.candidates + at * ROOM + place, token, mask=is_in & (place < ROOM))
        tl.store(scratch.greater + at * tl.num_programs(0) + tl.program_id(0), tl.sum(greater, axis=0))


@triton.jit
def _next_of(logit, token, is_in, last, last_token):
    """Return (logit, token) of the likeliest token after (last, last_token); ties by id."""
    is_in = is_in & ((logit < last) | ((logit == last) & (token > last_token)))
    best = tl.max(tl.where(is_in, logit, float("-inf")), axis=0)
    return best, tl.min(tl.where(is_in & (logit == best), token, _NO_ID), axis=0)


@triton.jit
def _next_in_row(own, last, last_token, shift, temperature, threshold, vocab, SIZE: tl.constexpr,
                 PROCESSED: tl.constexpr):
    """Return (logit, token) of the likeliest token of a whole logit row after (last, last_token); ties by id."""
    best = tl.full([], float("-inf"), dtype=tl.float32)
    best_token = tl.full([], 2147483647, dtype=tl.int32)
    for first in range(0, vocab, SIZE):
        token = first + tl.arange(0, SIZE)
        logit = _shaped(own, token, token < vocab, shift, temperature, threshold, PROCESSED)
        top, at = _next_of(logit, token, token < vocab, last, last_token)
        wins = (at != _NO_ID) & ((best_token == _NO_ID) | (top > best))
        best, best_token = tl.where(wins, top, best), tl.where(wins, at, best_token)
    return best, best_token


@kernel(do_not_specialize=["num_spans", "width"], do_not_specialize_on_alignment=["tokens"])
def _report_kernel(
    inputs, tokens, scratch, ids, values, mosts, norms, logit_stride, edited_stride, num_spans, num_tiles, num_counts,
    vocab, width, SIZE: tl.constexpr, ROOM: tl.constexpr, TILES: tl.constexpr, COUNTS: tl.constexpr,
    PROCESSED: tl.constexpr, SPANS: tl.constexpr, PDL: tl.constexpr,
):
    release_dependents(PDL)
    wait_for_inputs(PDL)
    at = tl.program_id(0).to(tl.int64)
    of = tl.load(inputs.row + at)
    wanted = tl.load(inputs.num_logprobs + of)
    if wanted >= 0:
        own, shift, temperature, threshold = _shape_of(
            inputs, at, of, logit_stride, edited_stride, num_spans, PROCESSED, SPANS
        )
        tile = tl.arange(0, TILES)
        is_tile = tile < num_tiles
        greatest = tl.load(scratch.tile_greatest + at * num_tiles + tile, mask=is_tile, other=float("-inf"))
        sums = tl.load(scratch.tile_sums + at * num_tiles + tile, mask=is_tile, other=0).to(tl.float32)
        most = tl.max(greatest, axis=0)
        is_finite = tl.abs(most) < float("inf")
        weight = tl.where(is_finite & (greatest > float("-inf")), tl.exp(greatest - most), 0.0)
        total = tl.sum((sums * (_ROW_UNIT / _TILE_UNIT) * weight).to(tl.int64), axis=0)
        # Apart from `most`: in a sum with a great logit nothing would be left of it.
        norm = tl.where(is_finite, tl.log(total.to(tl.float32) / _ROW_UNIT), float("nan"))
        tl.store(mosts + at, most)
        tl.store(norms + at, norm)
        chosen_token = tl.load(tokens + at)
        chosen = _shaped(own, chosen_token, True, shift, temperature, threshold, PROCESSED)
        count = tl.arange(0, COUNTS)
        greater = tl.load(scratch.greater + at * num_counts + count, mask=count < num_counts, other=0)
        own_ids, own_values = ids + at * (2 + width), values + at * (1 + width)
        tl.store(own_ids, tl.sum(greater, axis=0).to(tl.int64) + 1)
        tl.store(own_ids + 1, chosen_token)
        tl.store(own_values, chosen - most - norm)

        found = tl.load(scratch.num_candidates + at)
        index = tl.arange(0, ROOM)
        is_in = index < found
        token = tl.load(scratch.candidates + at * ROOM + index, mask=is_in, other=0)
        logit = _shaped(own, token, is_in, shift, temperature, threshold, PROCESSED)
        last = tl.full([], float("inf"), dtype=tl.float32)
        last_token = tl.full([], -1, dtype=tl.int32)
        for place in range(0, tl.minimum(wanted, width).to(tl.int32)):
            if found <= ROOM:
                last, last_token = _next_of(logit, token, is_in, last, last_token)
            else:
                last, last_token = _next_in_row(own, last, last_token, shift, temperature, threshold, vocab, SIZE,
                                                PROCESSED)
            tl.store(own_ids + 2 + place, tl.where(last_token == _NO_ID, 0, last_token).to(tl.int64))
            tl.store(own_values + 1 + place, last - most - norm)


def token_logprobs(
    inputs: LogprobLogits, tokens: torch.Tensor, spans: Spans, most: int, *, processed: bool, pdl: bool | None = None
) -> ReportedLogprobs:
    """Report the log-probabilities and ranks of `tokens` [logit rows], and the likeliest tokens: as many as the row
    asks for, at most `most`. Only logit rows that ask are written."""
    name, device, (num, vocab) = "token_logprobs", inputs.logits.device, inputs.logits.shape
    _check(name, inputs, tokens)
    width = min(most, vocab)
    require(width <= _GROUPS // 2, name, "most", f"is {most}, more than {_GROUPS // 2}")

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    out = ReportedLogprobs(empty(num, 2 + width, dtype=torch.int64), empty(num, 1 + width, dtype=torch.float32),
                           empty(num, dtype=torch.float32), empty(num, dtype=torch.float32))
    if num == 0:
        return out
    size = max(1024, next_power_of_two(cdiv(vocab, _GROUPS)))
    num_tiles = cdiv(vocab, size)
    group = next_power_of_two(cdiv(num_tiles * size, _GROUPS))
    num_groups, num_counts = num_tiles * (size // group), cdiv(num_tiles, _TILES_PER_COUNT)
    scratch = _Scratch(
        empty(num, num_tiles, dtype=torch.float32), empty(num, num_tiles, dtype=torch.int64),
        empty(num, num_groups, dtype=torch.float32), empty(num, num_counts, dtype=torch.int32),
        empty(num, dtype=torch.int32), empty(num, _ROOM, dtype=torch.int32),
    )
    pdl = uses_pdl(device) if pdl is None else pdl
    # Without fusion a value is the difference of three numbers that are rounded one by one, as the torch code has it.
    options = {"PROCESSED": processed, "SPANS": spans.most, "PDL": pdl, "enable_fp_fusion": False, **pdl_options(pdl)}
    strides = (inputs.logits.stride(0), inputs.edited.stride(0), spans.grid[0])
    span = spans.length  # as where they are scored: programs that have nothing to do take time as well
    _tiles_kernel[(cdiv(num_tiles, span), num)](
        inputs, scratch, *strides, vocab, num_tiles, span, SIZE=size, GROUP=group, num_warps=4, **options,
    )
    _count_kernel[(num_counts, num)](
        inputs, tokens, scratch, *strides, num_groups, vocab, SIZE=size, TILES=_TILES_PER_COUNT, ROOM=_ROOM,
        GROUPS=_GROUPS, num_warps=4, **options,
    )
    _report_kernel[(num,)](
        inputs, tokens, scratch, *out, *strides, num_tiles, num_counts, vocab, width, SIZE=size, ROOM=_ROOM,
        TILES=next_power_of_two(num_tiles), COUNTS=next_power_of_two(num_counts), num_warps=4, **options,
    )
    return out


def report_tokens(logits: torch.Tensor, tokens: torch.Tensor, num: int) -> ReportedLogprobs:
    """Return the log-probabilities of given tokens, from the same kernels as for sampled tokens; see `_report_tokens`
    in sample/logprobs.py for the arguments."""
    device, spans = logits.device, plan_spans(logits)
    row = torch.zeros(len(logits), dtype=torch.int64, device=device)
    asked = torch.full((1,), num, dtype=torch.int64, device=device)
    no_flags, greedy = torch.zeros_like(asked), torch.zeros(1, device=device)
    unread = torch.empty(len(logits), device=device)
    inputs = LogprobLogits(logits, logits, row, asked, no_flags, greedy, unread, spans.greatest)
    return token_logprobs(inputs, tokens, spans, num, processed=False)


def _check(name: str, inputs: LogprobLogits, tokens: torch.Tensor) -> None:
    device, (num, vocab) = inputs.logits.device, inputs.logits.shape
    floats, ints, num_rows = (torch.float32,), (torch.int64,), inputs.flags.shape[0]
    for field, shape, dtypes in (
        ("logits", (num, vocab), floats), ("edited", (num, vocab), floats), ("row", (num,), ints),
        ("num_logprobs", (num_rows,), ints), ("flags", (num_rows,), ints), ("temperature", (num_rows,), floats),
        ("thresholds", (num,), floats), ("greatest", (num, None), floats),
    ):
        require_tensor(name, f"inputs.{field}", getattr(inputs, field), shape, device, dtypes)
    require_tensor(name, "tokens", tokens, (num,), device, ints)
