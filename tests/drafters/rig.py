"""An engine with a drafter whose every proposal is written down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from outrider.core import ScheduledBatch
from outrider.drafters.base import Drafts, Step
from outrider.models.base import Model
from outrider.sched.request import Request
from outrider.speculation.draft_counts import DraftCounts, DraftPlan, clamp_drafts
from tests.engine.harness import Rig, choose_drafts


@dataclass(frozen=True)
class Proposal:
    request_id: int
    epoch: int
    known: tuple[int, ...]
    drafts: tuple[int, ...]


class DraftRig(Rig):
    """`propose_at(step number)` gives how many drafts to propose in a step, 0 for a cold one."""

    def __init__(self, model: Model, *, propose_at: Callable[[int], int] | None = None, **settings: Any) -> None:
        super().__init__(model, **settings)
        self.proposals: list[Proposal] = []
        self.num_cold = 0
        self._current: ScheduledBatch | None = None
        drafter = self.step.drafter
        assert drafter is not None
        self._propose, drafter.propose = drafter.propose, self._recorded  # type: ignore[method-assign]
        if propose_at is not None:
            choose_drafts(self.scheduler, _ChosenDrafts(self, propose_at, self.engine.limits.max_drafts))

    def _poison(self, batch: ScheduledBatch) -> None:
        self._current = batch
        self.num_cold += batch.drafting.num_wanted == 0
        super()._poison(batch)

    def _recorded(self, step: Step) -> Drafts:
        drafts = self._propose(step)
        batch = self._current
        assert batch is not None
        for i, row in enumerate(batch.rows):
            if bool(step.goes_on[i]):
                known = tuple(step.tokens[row, : int(step.known[row])].tolist())
                guess = tuple(drafts.tokens[i, : int(drafts.counts[i])].tolist())
                self.proposals.append(Proposal(batch.request_ids[i], batch.epochs[i], known, guess))
        return drafts


class _ChosenDrafts(DraftCounts):
    """FixedDrafts, but for the steps in which nothing is proposed."""

    def __init__(self, rig: DraftRig, propose_at: Callable[[int], int], k: int) -> None:
        self._rig, self._propose_at, self._k = rig, propose_at, k

    def choose(self, requests: list[Request], is_exact: bool) -> DraftPlan:
        wanted = [clamp_drafts(request, self._k, is_exact=False) for request in requests]
        return DraftPlan(wanted, self._propose_at(self._rig.scheduler.stats.num_steps))
