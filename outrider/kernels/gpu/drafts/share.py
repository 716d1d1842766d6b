"""Shares a step's token rows out among the drafts of a batch, those most likely to be accepted first, in one launch of
one program.

`kernels.step.share_drafts` is the specification, integer for integer. The smallest gain (chance of acceptance) that
still gets a token row is found by bisection, bit by bit, so thousands of drafts need no sort.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl

from outrider.core import NULL_ROW
from outrider.core.draft_confidence import (
    CHANCE_BITS,
    GAIN_BITS,
    LEVEL_BITS,
    MOST_CHANCE,
    MOST_PLACES,
    NUM_LEVELS,
    TOP_LEVEL,
    WEIGHT_BITS,
)
from outrider.kernels.gpu.common import next_power_of_two, require, require_tensor
from outrider.kernels.gpu.launch.triton_kernel import kernel
from outrider.kernels.packet import StepPacket
from outrider.kernels.step import RowFields

_NULL_ROW = tl.constexpr(NULL_ROW)
_CHANCE_BITS, _WEIGHT_BITS, _GAIN_BITS = tl.constexpr(CHANCE_BITS), tl.constexpr(WEIGHT_BITS), tl.constexpr(GAIN_BITS)
_WHOLE = tl.constexpr(1 << GAIN_BITS)
_LEVEL_BITS, _NUM_LEVELS, _TOP_LEVEL = tl.constexpr(LEVEL_BITS), tl.constexpr(NUM_LEVELS), tl.constexpr(TOP_LEVEL)
_MOST_PLACES = tl.constexpr(MOST_PLACES)
_MOST_CHANCE = tl.constexpr(int(MOST_CHANCE * (1 << CHANCE_BITS)))
_BLOCK = 1024  # padded token rows at a time


class _State(NamedTuple):
    known: torch.Tensor
    alive: torch.Tensor
    num_drafts: torch.Tensor
    levels: torch.Tensor
    end_len: torch.Tensor


@kernel(do_not_specialize=["requests", "tokens", "max_drafts"], do_not_specialize_on_alignment=list(StepPacket._fields))
def _share_kernel(
    rows, num_known, num_drafts, samples, query_starts, request_of, offset, logit_request, logit_draft, logit_token,
    boundaries, num_shared, weights, chances, state, requests, tokens, max_drafts,
    REQUESTS: tl.constexpr, DRAFTS: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr,
):
    total = tl.load(num_shared)
    if total > 0:
        request = tl.arange(0, REQUESTS)
        valid = request < requests
        row = tl.load(rows + request, mask=valid, other=_NULL_ROW)
        room = tl.load(state.end_len + row, mask=valid, other=0) - tl.load(state.known + row, mask=valid, other=0) - 1
        most = tl.minimum(
            tl.load(num_drafts + request, mask=valid, other=0), tl.load(state.num_drafts + row, mask=valid, other=0)
        )
        most = tl.minimum(most, tl.maximum(room, 0))
        is_live = (tl.load(state.alive + row, mask=valid, other=0) != 0) & (row != _NULL_ROW)
        is_live = is_live & (tl.load(samples + request, mask=valid, other=0) > 0)
        most = tl.where(is_live, most, 0)
        levels = tl.load(state.levels + row, mask=valid, other=0)
        weight = tl.load(weights + request, mask=valid, other=0)
        place = tl.arange(0, DRAFTS)[None, :]
        reached = tl.full([REQUESTS], _WHOLE, dtype=tl.int64)
        gains = tl.full([REQUESTS, DRAFTS], -1, dtype=tl.int64)
        for index in range(max_drafts):
            level = tl.where(index < _MOST_PLACES, (levels >> (_LEVEL_BITS * index)) & _TOP_LEVEL, 0)
            chance = tl.load(chances + index * _NUM_LEVELS + level, mask=valid, other=0)
            chance = tl.minimum(tl.maximum((chance * weight) >> _WEIGHT_BITS, 0), _MOST_CHANCE)
            reached = (reached * chance) >> _CHANCE_BITS
            own = tl.where(index < most, reached, -1)
            gains = tl.where(place == index, own[:, None], gains)

        # The greatest bound that as many gains reach as there are rows to share out, or 0 if there are fewer gains.
        flat = tl.reshape(gains, [REQUESTS * DRAFTS]).to(tl.int32)
        bound = tl.full([], 0, dtype=tl.int32)
        bit = tl.full([], _WHOLE // 2, dtype=tl.int32)
        for _ in range(_GAIN_BITS):
            is_higher = tl.sum((flat >= bound + bit).to(tl.int32), axis=0) >= total
            bound = tl.where(is_higher, bound + bit, bound)
            bit = bit >> 1
        is_above, is_equal = flat > bound, flat == bound
        left = total - tl.sum(is_above.to(tl.int32), axis=0)
        is_taken = is_above | (is_equal & (tl.cumsum(is_equal.to(tl.int32), axis=0) <= left))
        count = tl.sum(tl.reshape(is_taken.to(tl.int32), [REQUESTS, DRAFTS]), axis=1).to(tl.int64)

        known = tl.load(num_known + request, mask=valid, other=0)
        end = tl.cumsum(known + count, axis=0)
        start = end - known - count
        tl.store(num_drafts + request, count, mask=valid)
        tl.store(query_starts + request, start, mask=valid)
        used = tl.max(end, axis=0)
        tl.store(query_starts + requests, used)
        index = tl.arange(0, RUN)[None, :]
        at = start[:, None] + index
        is_token = valid[:, None] & (index < (known + count)[:, None]) & (at < tokens)
        owner = tl.broadcast_to(request[:, None].to(tl.int64), [REQUESTS, RUN])
        own_offset = tl.broadcast_to(index.to(tl.int64), [REQUESTS, RUN])
        tl.store(request_of + at, owner, mask=is_token)
        tl.store(offset + at, own_offset, mask=is_token)
        tl.store(logit_request + at, owner, mask=is_token)
        tl.store(logit_draft + at, own_offset, mask=is_token)
        tl.store(logit_token + at, at, mask=is_token)
        # Padding belongs to the last request, at offsets past all that it can have.
        last = tl.zeros([BLOCK], dtype=tl.int64) + (requests - 1)
        for first in range(used, tokens, BLOCK):
            behind = first + tl.arange(0, BLOCK)
            is_padding = behind < tokens
            tl.store(request_of + behind, last, mask=is_padding)
            tl.store(offset + behind, tl.zeros([BLOCK], dtype=tl.int64) + tokens, mask=is_padding)
            tl.store(logit_request + behind, last, mask=is_padding)
            tl.store(logit_draft + behind, tl.zeros([BLOCK], dtype=tl.int64) + max_drafts + 1, mask=is_padding)
            tl.store(logit_token + behind, tl.zeros([BLOCK], dtype=tl.int64), mask=is_padding)


def share_drafts(packet: StepPacket, rows: RowFields, *, max_drafts: int) -> None:
    """Divide the token rows among the drafts and lay out the batch again; see `kernels.step.share_drafts` for the
    arguments."""
    name, device, int64 = "share_drafts", packet.rows.device, (torch.int64,)
    (requests,), (tokens,) = packet.rows.shape, packet.request_of.shape
    sizes = {"query_starts": requests + 1, "num_shared": 1, "chances": max_drafts * NUM_LEVELS}
    per_token = ("request_of", "offset", "logit_request", "logit_draft", "logit_token")
    for field, tensor in zip(packet._fields, packet, strict=True):
        size = tokens if field in per_token else sizes.get(field, requests)
        require_tensor(name, f"packet.{field}", tensor, (size,), device, int64)
    state = _State(rows.known, rows.alive, rows.num_drafts, rows.levels, rows.sampling.end_len)
    for field, tensor in zip(state._fields, state, strict=True):
        dtype = torch.bool if field == "alive" else torch.int64
        require_tensor(name, f"rows.{field}", tensor, tuple(rows.known.shape), device, (dtype,))
    require(max_drafts > 0, name, "max_drafts", f"is {max_drafts}")
    if requests:
        _share_kernel[(1,)](
            *packet, state, requests, tokens, max_drafts, REQUESTS=next_power_of_two(requests),
            DRAFTS=next_power_of_two(max_drafts), RUN=next_power_of_two(max_drafts + 1), BLOCK=_BLOCK, num_warps=8,
        )
