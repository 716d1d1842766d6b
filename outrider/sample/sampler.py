"""The sampler: one token for every logit row, with drafts or without, greedy or sampled. There is no other.

A logit row's token is a function of its logits, its request's parameters, its history and its key: not of the other
logit rows, their order or number. No device tensor is read by the host. It does not know what becomes of the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from outrider.sample.batch import History, LogitRows
from outrider.sample.draw import choose_scaled, draw_tokens
from outrider.sample.edits import add_bias, allow_only, forbid_bad_words, forbid_early_stops, penalise
from outrider.sample.extras import StepExtras, StepNeeds
from outrider.sample.filters import keep_likely, scale
from outrider.sample.logprobs import LogprobRows, logprob_rows
from outrider.sample.rows import SamplingRows

LogprobsMode = Literal["raw", "processed"]

CHUNK_ELEMENTS = 2**24  # logits worked on at a time: bounds the scratch


@dataclass(frozen=True)
class Sampled:
    tokens: torch.Tensor  # [L] int64; 0 where bad
    bad: torch.Tensor  # [L] bool: the logits held a NaN or +inf, or nothing that may be chosen
    logprobs: LogprobRows | None


def sample(
    logits: torch.Tensor,
    logit_rows: LogitRows,
    rows: SamplingRows,
    history: History,
    needs: StepNeeds,
    extras: StepExtras,
    *,
    logprobs: LogprobsMode = "raw",
    chunk_elements: int = CHUNK_ELEMENTS,
) -> Sampled:
    """Chooses from logits [L, V], float32 or float64, which are left as they are."""
    num, vocab = logits.shape
    assert num == len(logit_rows), f"{num} rows of logits for {len(logit_rows)} logit rows"
    assert logits.dtype in (torch.float32, torch.float64), f"logits are {logits.dtype}; narrower ones make ties"
    extras.check(needs)
    drawn = logits, logit_rows.row, logit_rows.position, rows.keys, needs.any_sampled
    if needs.is_draw and draw_tokens.has_kernel(*drawn):  # in one go: there is no scratch
        return Sampled(*draw_tokens(*drawn), None)
    height = max(1, chunk_elements // vocab)
    if num <= height:
        return _Chunk(logit_rows, rows, history, needs, extras).sample(logits, logprobs)
    parts = []
    for start in range(0, num, height):
        stop = min(start + height, num)
        chunk = _Chunk(_between(logit_rows, start, stop), rows, history, needs, extras.between(start, stop))
        parts.append(chunk.sample(logits[start:stop], logprobs))
    found = [part.logprobs for part in parts if part.logprobs is not None]
    return Sampled(
        torch.cat([part.tokens for part in parts]),
        torch.cat([part.bad for part in parts]),
        LogprobRows.join(found) if found else None,
    )


def _between(logit_rows: LogitRows, start: int, stop: int) -> LogitRows:
    at = slice(start, stop)
    request, row = logit_rows.request[at], logit_rows.row[at]
    return LogitRows(request, row, logit_rows.draft_index[at], logit_rows.position[at])


@dataclass(frozen=True)
class _Chunk:
    """The steps of sampling, in order, over logit rows that are worked on together."""

    logit_rows: LogitRows
    rows: SamplingRows
    history: History
    needs: StepNeeds
    extras: StepExtras

    def sample(self, logits: torch.Tensor, mode: LogprobsMode) -> Sampled:
        num_logprobs = self.needs.max_logprobs
        edited = self.edit(logits) if self.needs.any_edits else logits
        shaped = edited
        if self.needs.any_sampled or (num_logprobs is not None and mode == "processed"):
            shaped = scale(edited, self.logit_rows.row, self.rows)
            keep_likely(shaped, self.logit_rows.row, self.rows, self.needs)
        at = self.logit_rows
        best = choose_scaled(shaped, at.row, at.position, self.rows.keys, self.needs.any_sampled)
        # A NaN or +inf is always the choice, so one look at the chosen logit finds it; -inf means nothing was left.
        bad = ~edited.gather(1, best[:, None]).squeeze(1).isfinite()
        if edited is not logits:
            bad |= ~logits.amax(dim=1).isfinite()
        tokens = best.masked_fill(bad, 0)  # the same in every batch
        if num_logprobs is None:
            return Sampled(tokens, bad, None)
        return Sampled(tokens, bad, logprob_rows(logits if mode == "raw" else shaped, tokens, num_logprobs))

    def edit(self, logits: torch.Tensor) -> torch.Tensor:
        """A copy with single logits changed. The order is part of what the parameters mean."""
        own = logits.clone(memory_format=torch.contiguous_format)
        if self.extras.allowed is not None:
            allow_only(own, self.extras.allowed)
        if self.extras.bad_words is not None:
            forbid_bad_words(own, self.extras.bad_words, self.logit_rows, self.history)
        if self.needs.any_min_tokens:
            forbid_early_stops(own, self.logit_rows, self.rows)
        if self.extras.bias is not None:
            add_bias(own, self.extras.bias)
        if self.needs.any_penalties:
            penalise(own, self.logit_rows, self.rows, self.history, self.needs)
        return own
