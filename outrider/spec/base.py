"""The protocol of drafters, and what they are given.

A drafter sees the step that has just been committed and guesses what follows it, for every request of the batch in
one pass. A wrong guess costs time, never text: acceptance compares drafts with what the one sampler picks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from outrider.attention.base import ForwardBatch
from outrider.cache.spec import LayerCache
from outrider.models.base import Hidden
from outrider.sample.accept import Accepted


@dataclass(frozen=True)
class Step:
    """A committed step, as drafters see it. Request tensors have the padded count; rows index persistent state."""

    batch: ForwardBatch
    hidden: Hidden  # of the step's token rows
    accepted: Accepted
    num_known: torch.Tensor  # [requests] live known tokens of the step
    tokens: torch.Tensor  # [ROWS, LENGTH] known tokens, this step's run included
    known: torch.Tensor  # [ROWS]
    most: int  # drafts wanted, at most


@dataclass(frozen=True)
class Drafts:
    tokens: torch.Tensor  # [requests, most]
    counts: torch.Tensor  # [requests] how many of them are meant


class Drafter(Protocol):
    name: str
    max_drafts: int
    taps: tuple[int, ...]  # hidden states of the target it declares in advance

    def cache_layers(self) -> list[LayerCache]: ...

    def propose(self, step: Step) -> Drafts: ...
