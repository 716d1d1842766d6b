"""What tests of trained heads share: mean runs, the drafts of a run, and ways in which a head goes wrong that leave the
text as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from outrider.core.outputs import RequestOutput
from outrider.kernels.drafting import DraftPasses
from outrider.mixers.batch import BatchView
from outrider.spec.autoregressive import AutoregressiveDrafter
from outrider.spec.base import Step
from tests.spec.rig import DraftRig

NGRAM_CEILING, HARM = 1.5, 0.5
Drafts = dict[tuple[int, ...], tuple[int, ...]]


def mean_run(outputs: Sequence[RequestOutput]) -> float:
    return sum(len(o.outputs[0].token_ids) for o in outputs) / sum(o.metrics.num_steps for o in outputs)


def drafts_of(rig: DraftRig) -> Drafts:
    """By what was known; the rig forgets them."""
    taken = {p.known: p.drafts for p in rig.proposals}
    rig.proposals.clear()
    return taken


def shuffled_hidden(drafter: AutoregressiveDrafter) -> None:
    """Every token row gets the hidden state of another."""
    consume = drafter.network.consume

    def shuffled(states: Any) -> torch.Tensor:
        hidden = consume(states)
        assert hidden is not None
        return hidden[torch.randperm(len(hidden), generator=torch.Generator().manual_seed(len(hidden)))]

    drafter.network.consume = shuffled  # type: ignore[method-assign]


def foreign_table(drafter: AutoregressiveDrafter) -> None:
    """Keys and values are written where they belong and read from the pages of the next request."""
    moved = drafter._batches._moved

    def misread(*args: Any) -> BatchView:
        view = moved(*args)
        return replace(view, page_tables=tuple(table.roll(1, dims=0) for table in view.page_tables))

    drafter._batches._moved = misread  # type: ignore[method-assign]


def late_position(drafter: AutoregressiveDrafter) -> None:
    """Further drafts stand two positions behind where they should."""
    further = drafter._batches.further

    def late(*args: Any) -> BatchView:
        view = further(*args)
        return replace(view, positions=view.positions + 2)

    drafter._batches.further = late  # type: ignore[method-assign]


def late_tokens(drafter: AutoregressiveDrafter) -> None:
    """Slots get the token of the slot two before them: a position off by two, for a head that knows no positions."""
    first = drafter._batches.first

    def late(step: Step, passes: DraftPasses) -> BatchView:
        view = first(step, passes)
        rows = view.rows[view.request_of]
        return replace(view, token_ids=step.tokens[rows, (view.positions - 2).clamp_min(0)])

    drafter._batches.first = late  # type: ignore[method-assign]
