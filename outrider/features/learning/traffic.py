"""TrafficRing: a bounded record of served texts, in memory only: their tokens, and the target's hidden states that the
drafter reads.

The ring has segments of equal length. A request that takes a row gets a segment, if one is free; the step writes the
tokens that it has computed and accepted there, position p at place p modulo the segment's length, so that a segment
keeps the last tokens of its text. When the request leaves its row, its segment is closed: nothing is written to it any
more, and the trainer may read it until it is given to another request, the oldest first.

    segment   | 0 ................ | 1 ................ | ... | nowhere |     places
    of row    |        3           |      closed        |     | padding, rejected drafts, rows without a segment

The thread of steps calls `admit`, `record`, `end` and `reset`; the trainer's thread calls `closed` and `read`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from outrider.core import Admission, Axis, Limits, RowEnd
from outrider.drafters.base import Step
from outrider.kernels.buffers import buffer, lazy_zeros, to_device

HELD_OUT_EVERY = 4  # every fourth text is measured with, and never trained on
MOST_OPEN = 0.75  # share of the segments that running requests may hold: the others hold texts to learn from


@dataclass(eq=False)
class RingSegment:
    """One part of the ring, and the text that it holds. A segment is free, open (a row writes to it) or closed (the
    trainer may read it)."""

    start: int  # its first place
    number: int = -1  # of its text, counted from the start; -1: none yet
    prompt_len: int = 0
    num_served: int = 0  # tokens of the text that count, once it is closed
    is_borrowed: bool = False  # the trainer reads it

    @property
    def is_held_out(self) -> bool:
        return self.number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1


class ClosedText(NamedTuple):
    """A recorded text, as listed by `TrafficRing.closed`. If the ring has reused its segment since, the segment's
    number differs from this one, and the text is gone."""

    segment: RingSegment
    number: int


@dataclass(frozen=True)
class ServedText:
    """The last tokens of a served text, in order, with their hidden states, on the device."""

    tokens: torch.Tensor  # [length] int64
    aux_states: torch.Tensor  # [length, layers, hidden] the target's residual streams
    answer_from: int  # index of the first token that the target said; the tokens before it are the prompt's


class TrafficRing:
    def __init__(self, limits: Limits, num_tokens: int, num_aux: int, hidden_size: int, *, segment_tokens: int,
                 dtype: torch.dtype, device: torch.device) -> None:
        self.segment_tokens, self._device = segment_tokens, device
        self._nowhere = num_tokens  # the last place: of states of no token that counts
        num_places = num_tokens + 1
        self.tokens = torch.zeros(num_places, dtype=torch.int64, device=device)
        self.positions = torch.full((num_places,), -1, dtype=torch.int64, device=device)
        # [places, hidden] of each auxiliary state. On a CPU they take memory when they are first written.
        self.aux_states = [lazy_zeros(num_places, hidden_size, dtype=dtype, device=device) for _ in range(num_aux)]
        self._lock = threading.Lock()
        self._free = [RingSegment(start) for start in range(0, self._nowhere, segment_tokens)]
        self._open: dict[int, RingSegment] = {}  # by row
        self._closed: list[RingSegment] = []  # the oldest first
        self._most_open = max(1, int(MOST_OPEN * len(self._free)))
        self._closed_at: torch.cuda.Event | None = None  # when the step's writes to the last closed segment are done
        self.num_texts = 0  # closed so far
        self.num_tokens = 0  # of the texts that may be trained on
        self.bind(limits)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.tokens, self.positions, *self.aux_states))

    # On the thread of steps

    def bind(self, limits: Limits) -> None:
        """Called once, before the first step, when no row holds a request."""
        self._start_of = buffer(limits, Axis.ROWS, dtype=torch.int64, device=self._device, fill=-1)

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Give segments to requests that take rows. Some requests are never recorded: those with a `cache_salt`,
        because it separates tenants, and those whose texts do not come from the model and its token ids alone (an
        adapter, inputs beside token ids, hidden states)."""
        rows, starts = [], []
        with self._lock:
            for own in admissions:
                self._free_segment(self._open.pop(own.row, None))
                segment = self._next_segment() if _may_record(own) else None
                rows.append(own.row)
                starts.append(-1 if segment is None else segment.start)
                if segment is not None:
                    segment.number, segment.prompt_len, segment.num_served = -1, own.prompt_len, 0
                    self._open[own.row] = segment
                    self.positions[segment.start : segment.start + self.segment_tokens].fill_(-1)
        if rows:
            self._start_of.index_copy_(0, to_device(rows, torch.int64, self._device),
                                       to_device(starts, torch.int64, self._device))

    def record(self, step: Step) -> None:
        """Keep the tokens that the step has computed and accepted. The call is captured with the step, so it reads
        nothing on the host."""
        view, place = step.batch.padded, self._places(step)
        self.tokens.index_copy_(0, place, view.token_ids)
        self.positions.index_copy_(0, place, view.positions)
        for kept, aux_state in zip(self.aux_states, step.hidden.aux_states, strict=True):
            kept.index_copy_(0, place, aux_state.to(kept.dtype))

    def _places(self, step: Step) -> torch.Tensor:
        """Return [token rows]: the place in the ring for the states of each token row. Only the place `nowhere` may be
        written by several token rows."""
        view = step.batch.padded
        of = view.request_of
        index = torch.arange(view.num_tokens, device=of.device) - view.query_starts[of]
        end = step.computed_before + step.num_computed
        start = self._start_of[view.rows]
        # A segment keeps the last tokens: of a chunk that is longer, the others have no place.
        is_kept = (index < step.num_computed[of]) & (view.positions >= end[of] - self.segment_tokens)
        return torch.where(is_kept & (start[of] >= 0), start[of] + view.positions % self.segment_tokens, self._nowhere)

    def end(self, ends: Sequence[RowEnd]) -> None:
        """Close the segments of rows whose requests have left."""
        with self._lock:
            for row, num_served in ends:
                segment = self._open.pop(row, None)
                if segment is None:
                    continue
                if num_served <= segment.prompt_len:  # aborted, failed, or nothing was said
                    self._free_segment(segment)
                    continue
                segment.number, segment.num_served = self.num_texts, num_served
                self._closed.append(segment)
                self.num_texts += 1
                if not segment.is_held_out:
                    self.num_tokens += min(num_served, self.segment_tokens)
            if self._device.type == "cuda":
                self._closed_at = torch.cuda.Event()
                self._closed_at.record()
        if ends:  # a row without a request is written by no step, but its last step may still be queued behind this
            rows = to_device([end.row for end in ends], torch.int64, self._device)
            self._start_of.index_fill_(0, rows, -1)

    def reset(self) -> None:
        """Drop open segments after a failed step, which leaves their content unknown."""
        with self._lock:
            for segment in self._open.values():
                self._free_segment(segment)
            self._open.clear()
        self._start_of.fill_(-1)

    def clear(self) -> None:
        """Forget all texts. Called only while the trainer does not read."""
        self.reset()
        with self._lock:
            self._free += self._closed
            self._closed = []

    def _next_segment(self) -> RingSegment | None:
        if len(self._open) >= self._most_open:
            return None
        if self._free:
            return self._free.pop()
        oldest = next((segment for segment in self._closed if not segment.is_borrowed), None)
        if oldest is not None:
            self._closed.remove(oldest)
        return oldest

    def _free_segment(self, segment: RingSegment | None) -> None:
        if segment is not None:
            self._free.append(segment)

    # On the trainer's thread

    def closed(self, *, is_held_out: bool) -> list[ClosedText]:
        """The texts that the ring holds, the oldest first."""
        with self._lock:
            return [ClosedText(segment, segment.number) for segment in self._closed
                    if segment.is_held_out is is_held_out]

    def read(self, wanted: Sequence[ClosedText]) -> list[ServedText]:
        """Copy those of the texts that the ring still holds. While they are copied, their segments are not given to
        other requests."""
        with self._lock:
            held_now = {(segment.start, segment.number) for segment in self._closed}
            held = [text.segment for text in wanted if (text.segment.start, text.number) in held_now]
            for segment in held:
                segment.is_borrowed = True
            event = self._closed_at
        try:
            if event is not None:
                event.wait()
            texts = [text for segment in held if (text := self._read(segment)) is not None]
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
        finally:
            with self._lock:
                for segment in held:
                    segment.is_borrowed = False
        return texts

    def _read(self, segment: RingSegment) -> ServedText | None:
        places = slice(segment.start, segment.start + self.segment_tokens)
        positions = self.positions[places]
        order = positions.argsort()
        is_served = (positions[order] >= 0) & (positions[order] < segment.num_served)
        order = order[is_served]
        if len(order) < 3:  # a head needs a token, a hidden state before it, and a token to guess
            return None
        first = int(positions[order[0]])
        aux_states = torch.stack([aux_state[places][order] for aux_state in self.aux_states], dim=1)
        return ServedText(self.tokens[places][order], aux_states, max(1, segment.prompt_len - first))


def _may_record(admission: Admission) -> bool:
    asked = admission.request
    return (asked.generates and asked.cache_salt is None and not asked.input_parts
            and all(part.cache_key is None for part in asked.parts))
