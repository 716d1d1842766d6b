"""AuxRecorder: a drafter that drafts nothing and keeps the hidden states of the texts that the engine computes.

The engine treats it like any drafter, so it records the forward passes of serving: with the served weights, every kind
of layer, and chunks and batches as the scheduler makes them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.core import Admission, Axis, Limits
from outrider.drafters.base import Drafter, Drafts, HiddenReads, Step
from outrider.kernels.buffers import buffer, to_device
from outrider.mixers import CachedLayers


class AuxRecorder(Drafter):
    name = "auxiliary states"
    max_drafts = 0
    reads_hidden = HiddenReads.ALL

    def __init__(self, aux_layers: tuple[int, ...], hidden_size: int, dtype: torch.dtype) -> None:
        self.aux_layers, self.dtype = aux_layers, dtype
        self.width = (len(aux_layers) + 1) * hidden_size
        self._starts: dict[tuple[int, ...], int] = {}

    @property
    def row_bytes(self) -> int:
        """The size in bytes of one token's states."""
        return self.width * self.dtype.itemsize

    def bind(self, cached: CachedLayers, limits: Limits, device: torch.device) -> None:
        self._device = device
        self._start_of = buffer(limits, Axis.ROWS, dtype=torch.int64, device=device)
        self._length_of = buffer(limits, Axis.ROWS, dtype=torch.int64, device=device)
        self.expect([], self.recording(0))

    def recording(self, num_tokens: int) -> torch.Tensor:
        """Allocate [tokens + 1, auxiliary states and final state], for texts with this number of tokens. The last row
        receives the states of tokens that belong to no text: padding, and sampled tokens."""
        return torch.empty(num_tokens + 1, self.width, dtype=self.dtype, device=self._device)

    def expect(self, texts: Sequence[tuple[int, ...]], recording: torch.Tensor) -> dict[tuple[int, ...], int]:
        """Record the states of these texts from now on. Returns the row of the recording at which each text begins;
        equal texts share one."""
        self._starts, start = {}, 0
        for text in texts:
            if text not in self._starts:
                self._starts[text] = start
                start += len(text)
        self._states, self._nowhere = recording, len(recording) - 1
        assert start <= self._nowhere, f"{start} tokens in a recording of at most {self._nowhere}"
        self._is_written = torch.zeros(len(recording), dtype=torch.bool, device=self._device)
        return self._starts

    def has_recorded_all(self) -> bool:
        """Whether the states of all tokens of the expected texts have been recorded."""
        return bool(self._is_written[: sum(map(len, self._starts))].all())

    def admit(self, admissions: list[Admission]) -> None:
        rows, starts, lengths = [], [], []
        for own in admissions:
            start = self._starts.get(own.request.token_ids)
            rows.append(own.row)
            starts.append(0 if start is None else start)
            lengths.append(0 if start is None else own.prompt_len)
        if rows:
            at = to_device(rows, torch.int64, self._device)
            self._start_of.index_copy_(0, at, to_device(starts, torch.int64, self._device))
            self._length_of.index_copy_(0, at, to_device(lengths, torch.int64, self._device))

    def skip(self, step: Step) -> None:
        view = step.batch.padded
        rows = view.rows[view.request_of]
        # Live tokens come first among a request's own.
        index = torch.arange(view.num_tokens, device=rows.device) - view.query_starts[view.request_of]
        is_text = (index < view.live[view.request_of]) & (view.positions < self._length_of[rows])
        place = torch.where(is_text, self._start_of[rows] + view.positions, self._nowhere)
        states = torch.cat((*step.hidden.aux_states, step.hidden.final), dim=-1)
        self._states.index_copy_(0, place, states.to(self.dtype))
        self._is_written.index_fill_(0, place, True)

    def propose(self, step: Step) -> Drafts:
        raise AssertionError("a recorder makes no drafts (max_drafts is 0), but was asked for some: this is a bug")
