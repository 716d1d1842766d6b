"""The protocol of drafters, and what they are given.

A drafter sees the step that has just been committed and guesses what follows it, for every request of the batch in
one pass. A wrong guess costs time, never text: acceptance compares drafts with what the one sampler picks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.cache.groups import LayerCache
from outrider.core import Admission, Limits
from outrider.kernels.accept import Accepted
from outrider.layers import LayeredModule
from outrider.mixers import AttentionLayer, CachedLayers, ForwardBatch
from outrider.models.base import Hidden, Model
from outrider.sample.rows import SamplingRows


@dataclass(frozen=True)
class DraftBuild:
    """What making a drafter needs to know of the engine it joins."""

    target: Model
    dtype: torch.dtype
    device: torch.device
    max_len: int
    load_format: str = "auto"
    seed: int = 0
    target_source: str | None = None  # the target's own files, where a module of its checkpoint is to be read
    num_drafter_layers: int = 0  # attention layers of the drafters made before this one

    @property
    def first_layer(self) -> int:
        """Drafters' layers are numbered after the target's and each other's."""
        return self.target.num_layers + self.num_drafter_layers


@dataclass(frozen=True)
class Step:
    """A committed step, as drafters see it. Request tensors have the padded count; ROWS tensors are row state."""

    batch: ForwardBatch
    hidden: Hidden  # of the step's token rows
    accepted: Accepted
    computed_before: torch.Tensor  # [requests] computed tokens when the step began
    num_computed: torch.Tensor  # [requests] tokens it computed: known ones and accepted drafts
    guesses: torch.Tensor  # [requests] got a run and goes on
    tokens: torch.Tensor  # [ROWS, LENGTH] known tokens, this step's run included
    known: torch.Tensor  # [ROWS]
    sampling: SamplingRows
    any_sampled: bool  # some request of the batch has a temperature
    most: int  # drafts wanted for each request, at most


@dataclass(frozen=True)
class Drafts:
    tokens: torch.Tensor  # [requests, step.most] int64
    counts: torch.Tensor  # [requests] how many of them are meant


class Drafter:
    """Override `propose`; the rest is for drafters with layers, hidden states or rows of their own."""

    name = "custom"
    max_drafts = 0  # drafts it can make; the engine's num_speculative_tokens
    taps: tuple[int, ...] = ()  # target layers whose hidden states it reads
    attention_layers: tuple[AttentionLayer, ...] = ()  # its own, numbered after the target's
    lookahead = 0  # slots past the computed tokens that it writes

    def cache_layers(self) -> list[LayerCache]:
        return []

    def bind(self, cached: CachedLayers, limits: Limits, num_pages: int, device: torch.device) -> None:
        """Once, before the first step: its layers' cache, and the sizes for its own row state."""

    def admit(self, admissions: list[Admission]) -> None:
        """Requests take rows; before the step that first schedules them."""

    @property
    def has_slots_to_fill(self) -> bool:
        """Whether rows just admitted wait for the next step to fill slots of theirs. Such a step runs uncaptured."""
        return False

    def propose(self, step: Step) -> Drafts:
        """Guess up to `step.most` tokens for every request. No host reads; rows that do not guess may hold anything."""
        raise NotImplementedError

    def skip(self, step: Step) -> None:
        """The step passes without a proposal: whatever is kept of the rows must not pretend to have seen it."""

    def modules(self) -> list[LayeredModule]:
        """The models and heads that it runs."""
        return []

    def weight_bytes(self) -> int:
        return 0

    def page_bytes(self, itemsize: int) -> int:
        """What it keeps with every page beside its layers' cache, of values of `itemsize` bytes."""
        return 0
