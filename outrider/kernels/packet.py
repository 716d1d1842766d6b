"""StepPacket: the integers that the host sends to the device for one step, declared once.

From this declaration the integers are packed on the host, unpacked into named views of one device tensor, and counted.
Triton kernels take the same views.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Annotated, NamedTuple, get_type_hints

import torch

from outrider.core import NULL_ROW, Axis
from outrider.core.draft_confidence import NUM_LEVELS
from outrider.kernels.buffers import to_device

PerRequest = Annotated[torch.Tensor, Axis.REQUESTS]
PerStart = Annotated[torch.Tensor, Axis.STARTS]
PerToken = Annotated[torch.Tensor, Axis.TOKENS]
PerLogitRow = Annotated[torch.Tensor, Axis.LOGIT_ROWS]
PerBatch = Annotated[torch.Tensor, Axis.BATCHES]
PerChance = Annotated[torch.Tensor, Axis.CHANCES]


@dataclass(frozen=True)
class StepExtents:
    """Padded sizes of a step's axes."""

    requests: int
    tokens: int
    logit_rows: int
    max_drafts: int  # drafts of one request

    def extent(self, axis: Axis) -> int:
        match axis:
            case Axis.REQUESTS:
                return self.requests
            case Axis.STARTS:
                return self.requests + 1
            case Axis.TOKENS:
                return self.tokens
            case Axis.LOGIT_ROWS:
                return self.logit_rows
            case Axis.BATCHES:
                return 1
            case Axis.CHANCES:
                return self.max_drafts * NUM_LEVELS
            case _:
                raise ValueError(f"the integers of a step have no axis {axis.value}. This is a bug: please report it")

    @cached_property
    def field_sizes(self) -> list[int]:
        """The number of integers of each field of a packet, in order."""
        return [self.extent(axis) for axis in packet_axes()]


class StepPacket(NamedTuple):
    """The scheduler's decisions for a step, as int64 device tensors."""

    rows: PerRequest
    num_known: PerRequest  # known tokens
    num_drafts: PerRequest
    samples: PerRequest  # 0 or 1
    query_starts: PerStart
    request_of: PerToken
    offset: PerToken  # place among the request's tokens; past all of them for padded tokens
    logit_request: PerLogitRow
    logit_draft: PerLogitRow  # drafts before it; more than any request has for padded logit rows
    logit_token: PerLogitRow  # token row whose hidden state makes the logit row
    boundaries: PerRequest  # tokens after which the request writes the checkpoint that its row lists; or -1
    num_shared: PerBatch  # drafts that `share_drafts` shares out: see `DraftSharing`. 0: num_drafts and all else hold
    weights: PerRequest
    chances: PerChance


@cache
def packet_axes() -> tuple[Axis, ...]:
    hints = get_type_hints(StepPacket, include_extras=True)
    return tuple(hints[name].__metadata__[0] for name in StepPacket._fields)


def pack(extents: StepExtents, fields: Sequence[Sequence[int]]) -> list[int]:
    """Concatenate the scheduled values of every field, in order, each padded to its extent. Padded tokens and logit
    rows belong to the last request, at offsets beyond all that a request can have, so that they are never live."""
    last = extents.requests - 1
    padding = (NULL_ROW, 0, 0, 0, 0, last, extents.tokens, last, extents.max_drafts + 1, 0, -1, 0, 0, 0)
    ints: list[int] = []
    for values, size, fill in zip(fields, extents.field_sizes, padding, strict=True):
        ints += values
        ints += [fill] * (size - len(values))
    return ints


def empty_packet(extents: StepExtents, device: torch.device) -> torch.Tensor:
    """Return the integers of a step without requests: all rows are the null row, all tokens and logit rows are
    padding."""
    return to_device(pack(extents, [()] * len(StepPacket._fields)), torch.int64, device)


def unpack(extents: StepExtents, ints: torch.Tensor) -> StepPacket:
    """Return views of `ints`, the packed device tensor, by field."""
    return StepPacket(*ints.split(extents.field_sizes))
