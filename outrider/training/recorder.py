"""TapRecorder: a drafter that drafts nothing and keeps the hidden states of the texts that the engine computes.

The engine treats it like any drafter, so what it records is the engine's own forward: the weights as they are served,
every kind of layer, chunks and batches as they come.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.core import Admission, Axis, Limits
from outrider.drafters.base import Drafter, Drafts, HiddenReads, Step
from outrider.kernels.buffers import buffer, to_device
from outrider.mixers import CachedLayers


class TapRecorder(Drafter):
    name = "tap recorder"
    max_drafts = 0
    reads_hidden = HiddenReads.ALL

    def __init__(self, taps: tuple[int, ...], hidden_size: int, dtype: torch.dtype) -> None:
        self.taps = taps
        self._width, self._dtype = (len(taps) + 1) * hidden_size, dtype
        self._starts: dict[tuple[int, ...], int] = {}

    def bind(self, cached: CachedLayers, limits: Limits, device: torch.device) -> None:
        self._device = device
        # The last token row takes the states of tokens that belong to no text: padding, and sampled ones.
        self._nowhere = limits.extent(Axis.TOKENS)
        # [TOKENS + 1, taps and final state]: a recording has at most the tokens of one batch.
        self.states = torch.zeros(self._nowhere + 1, self._width, dtype=self._dtype, device=device)
        self.is_written = torch.zeros(self._nowhere + 1, dtype=torch.bool, device=device)
        self._start_of = buffer(limits, Axis.ROWS, dtype=torch.int64, device=device, fill=self._nowhere)
        self._length_of = buffer(limits, Axis.ROWS, dtype=torch.int64, device=device)

    def expect(self, texts: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], int]:
        """Give each text its place in `states`. Returns the first token row of each; equal texts share theirs."""
        self._starts, start = {}, 0
        for text in texts:
            if text not in self._starts:
                self._starts[text] = start
                start += len(text)
        assert start <= self._nowhere, f"{start} tokens in a recording of at most {self._nowhere}"
        self.is_written.zero_()
        return self._starts

    def admit(self, admissions: list[Admission]) -> None:
        rows, starts, lengths = [], [], []
        for own in admissions:
            start = self._starts.get(own.request.token_ids)
            rows.append(own.row)
            starts.append(self._nowhere if start is None else start)
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
        states = torch.cat((*step.hidden.taps, step.hidden.final), dim=-1)
        self.states.index_copy_(0, place, states.to(self._dtype))
        self.is_written.index_fill_(0, place, True)

    def propose(self, step: Step) -> Drafts:
        raise AssertionError("a recorder with max_drafts = 0 is never asked for drafts")
