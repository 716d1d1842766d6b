"""DraftingBatches: builds the batches of all drafting passes from the batch of the target's step.

The token rows of a pass differ from those of the step: `kernels.drafting` computes their positions, slots and lengths.
Page tables are those of the step's batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from outrider.cache.groups import Group
from outrider.core import Axis, Limits
from outrider.drafters.base import Step
from outrider.kernels.drafting import (
    CommittedRequests,
    DraftingRows,
    DraftPass,
    DraftPasses,
    FirstSlots,
    ReadingPass,
    Tables,
)
from outrider.mixers import BatchView, ExactQueries, KeysFrom


class DraftingBatches:
    def __init__(self, groups: Sequence[Group], limits: Limits, device: torch.device) -> None:
        """groups: the groups of layers, with one page table each, to which the drafter's layers belong."""
        self.groups = tuple(groups)
        self._max_len = limits.max_len
        self._single = SingleTokenView(limits, device)

    def tables(self, view: BatchView) -> Tables:
        """Return the page tables of the drafter's cache groups."""
        return tuple(view.page_tables[group.index] for group in self.groups)

    def first(self, step: Step, passes: DraftPasses) -> BatchView:
        """Make the batch of the first pass: the token rows of the step, each moved to the next position."""
        keys = KeysFrom(passes.key_starts, passes.key_starts_int32)
        return self._moved(step.batch.padded, step, 1, passes.tokens, passes.first, keys)

    def last_tokens(self, first: BatchView, token_rows: torch.Tensor) -> BatchView:
        """Make a batch with only the last token of every request, taken from the first pass, for layers that need no
        other rows. token_rows: the rows of these tokens in the first pass. Nothing is written to the cache."""
        single, live = self._single.cut(first), first.live.clamp_max(1)
        return replace(
            single, token_ids=first.token_ids[token_rows], positions=first.positions[token_rows], live=live,
            live_int32=live.int(), token_slots=(torch.full_like(token_rows, -1),) * len(first.token_slots),
        )

    def further(self, step: Step, passes: DraftPasses, index: int, tokens: torch.Tensor) -> BatchView:
        """Make the batch of a drafting pass after the first. It has one token per request: the draft that precedes
        draft `index`. The token of a request that has ended is arbitrary."""
        keys = KeysFrom(passes.key_starts, passes.key_starts_int32)
        single = self._single.cut(step.batch.padded)
        return self._moved(single, step, 1 + index, tokens, passes.further[index - 1], keys)

    def first_slots(self, admitted: BatchView, planned: FirstSlots) -> BatchView:
        """Make the batch of the pass for newly admitted rows. It fills one slot of each row: the one just before the
        first slot that the row's steps fill."""
        keys = KeysFrom(planned.key_starts, planned.key_starts_int32)
        return self._with_rows(admitted, admitted.token_ids, planned.only, keys)

    def reading(self, step: Step, reading: ReadingPass) -> BatchView:
        """Make the batch of a pass that only reads the cache. Each live request has one query, at its last computed
        token."""
        single, only = self._single.cut(step.batch.padded), reading.only
        return replace(
            single, token_ids=reading.tokens, positions=only.positions, lengths=only.lengths, live=only.live,
            lengths_int32=only.lengths_int32, live_int32=only.live_int32,
            token_slots=only.slots * len(single.token_slots),
        )

    def _moved(self, view: BatchView, step: Step, ahead: int, tokens: torch.Tensor, rows: DraftPass,
               keys: KeysFrom) -> BatchView:
        """Return the view with the token rows of a drafting pass instead. Their contexts are at most `ahead` tokens
        longer than those of the step."""
        bound = step.batch.padded.max_length.after(ahead, self._max_len)
        return replace(self._with_rows(view, tokens, rows, keys), max_length=bound)

    def _with_rows(self, view: BatchView, tokens: torch.Tensor, rows: DraftPass, keys: KeysFrom) -> BatchView:
        slots = list(view.token_slots)
        for group, own in zip(self.groups, rows.slots, strict=True):
            slots[group.index] = own
        return replace(
            view, token_ids=tokens, positions=rows.positions, lengths=rows.lengths, live=rows.live,
            lengths_int32=rows.lengths_int32, live_int32=rows.live_int32, token_slots=tuple(slots), visible=keys,
        )


class SingleTokenView:
    """Makes views with one token per request. All batches have the same query starts, so these are made once."""

    def __init__(self, limits: Limits, device: torch.device) -> None:
        self._starts = torch.arange(limits.extent(Axis.STARTS), device=device)
        self._starts_int32 = self._starts.int()

    def cut(self, view: BatchView) -> BatchView:
        count = view.num_requests
        if count < len(self._starts):
            starts, starts_int32 = self._starts[: count + 1], self._starts_int32[: count + 1]
        else:  # padding adds more requests than can run
            starts = torch.arange(count + 1, device=self._starts.device)
            starts_int32 = starts.int()
        return replace(view, num_tokens=count, queries=ExactQueries((1,) * count), query_starts=starts,
                       query_starts_int32=starts_int32, request_of=starts[:-1])


def committed_requests(step: Step) -> CommittedRequests:
    view = step.batch.padded
    return CommittedRequests(view.rows, view.query_starts, view.request_of, step.computed_before, step.num_computed,
                             step.goes_on)


def drafting_rows(step: Step) -> DraftingRows:
    sampling = step.sampling
    return DraftingRows(step.tokens, step.known, sampling.seed, sampling.sample_index, sampling.temperature)
