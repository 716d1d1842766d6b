"""TrainedHead: the checks that every small trained head passes, with its target, prompts and floor. Beside it are mean
runs, the drafts of a run, and ways in which a head goes wrong that leave the text as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from outrider.core.outputs import RequestOutput
from outrider.core.params import SamplingParams
from outrider.drafters.autoregressive import AutoregressiveDrafter
from outrider.drafters.base import Step
from outrider.kernels.drafting import DraftPasses
from outrider.mixers.batch import BatchView
from outrider.models.base import Model
from outrider.models.loader import load_model
from outrider.models.sources import resolve
from tests.drafters.rig import DraftRig
from tests.engine.harness import Ask, Rig, greedy, tokens_of

NGRAM_CEILING, HARM = 1.5, 0.5
Drafts = dict[tuple[int, ...], tuple[int, ...]]


def mean_run(outputs: Sequence[RequestOutput]) -> float:
    return sum(len(o.outputs[0].token_ids) for o in outputs) / sum(o.metrics.num_steps for o in outputs)


def drafts_of(rig: DraftRig) -> Drafts:
    """The drafts by what was known; the rig forgets them."""
    taken = {p.known: p.drafts for p in rig.proposals}
    rig.proposals.clear()
    return taken


@dataclass
class TrainedHead:
    """Everything is made when it is first asked for, and kept."""

    folder: Path  # of the target
    make_prompts: Callable[[], list[list[int]]]  # 16 of them
    speculative: dict[str, Any]
    length: int  # tokens of an answer
    floor: float  # of the mean run
    settings: dict[str, Any]
    _plain: dict[SamplingParams | None, list[list[list[int]]]] = field(default_factory=dict)

    @cached_property
    def target(self) -> Model:
        return load_model(resolve(self.folder), dtype=torch.float64, device="cpu")

    @cached_property
    def prompts(self) -> list[list[int]]:
        return self.make_prompts()

    def asks(self, params: SamplingParams | None = None) -> list[Ask]:
        return [Ask(prompt, params or greedy(self.length)) for prompt in self.prompts]

    def sampled(self) -> SamplingParams:
        return SamplingParams(temperature=1.0, seed=11, max_tokens=self.length)

    def rig(self, **more: Any) -> Rig:
        return Rig(self.target, **({"speculative_config": self.speculative} | self.settings | more))

    def draft_rig(self, **more: Any) -> DraftRig:
        return DraftRig(self.target, **({"speculative_config": self.speculative} | self.settings | more))

    def plain(self, params: SamplingParams | None = None) -> list[list[list[int]]]:
        """The tokens without drafts."""
        if params not in self._plain:
            with Rig(self.target, **self.settings) as rig:
                self._plain[params] = tokens_of(rig.run(self.asks(params)))
        return self._plain[params]

    @cached_property
    def healthy(self) -> tuple[float, Drafts]:
        """Mean run and drafts of the head as it is, in a batch of 16."""
        with self.draft_rig() as rig:
            outputs = rig.run(self.asks())
            assert max(batch.num_requests for batch in rig.batches) == 16
            assert tokens_of(outputs) == self.plain()
            return mean_run(outputs), drafts_of(rig)

    def check_floor_and_ngram(self) -> None:
        """The head reaches its floor, on prompts where an n-gram drafter finds next to nothing."""
        assert self.healthy[0] >= self.floor
        ngram = {"method": "ngram", "num_speculative_tokens": self.speculative["num_speculative_tokens"], "auto": False}
        with self.rig(speculative_config=ngram) as rig:
            outputs = rig.run(self.asks())
            assert tokens_of(outputs) == self.plain()
            assert mean_run(outputs) < NGRAM_CEILING

    def check_sampled(self) -> None:
        """At temperature 1 it drafts with the target's own noise."""
        with self.rig() as rig:
            outputs = rig.run(self.asks(self.sampled()))
            assert tokens_of(outputs) == self.plain(self.sampled()) != self.plain()
            assert mean_run(outputs) >= self.floor

    def check_harmed(self, harm: Callable[[AutoregressiveDrafter], None]) -> None:
        """A broken head shows in the mean run and in nothing else."""
        # Unseen tails of foreign pages are not poisoned: the harm is to be in what is read, not in NaN.
        with self.rig(poison=False) as rig:
            assert isinstance(rig.step.drafter, AutoregressiveDrafter)
            harm(rig.step.drafter)
            outputs = rig.run(self.asks())
            assert tokens_of(outputs) == self.plain()
            assert mean_run(outputs) <= self.healthy[0] - HARM


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
