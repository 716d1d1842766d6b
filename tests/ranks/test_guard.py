"""Drafters that fail on ranks: a user's own loses its drafts and may run no sum, one of the package fails the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.core import Admission, Limits
from outrider.drafters.base import Drafter, Drafts, Step
from outrider.drafters.guard import DrafterGuards
from outrider.drafters.ngram import NgramDrafter
from outrider.runner.rank_link import RankLink
from outrider.runner.rank_status import STATUS_FIELDS, RankStatus
from outrider.runner.worker_ranks import WatchedRanks, WorkerRanks


class CountedRanks:
    """Two ranks with equal parts."""

    rank, count, num_sums = 0, 2, 0

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        self.num_sums += 1
        return 2 * part

    def gather(self, part: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat([part, part], dim)


def guarded(drafter: Drafter, group: WatchedRanks) -> DrafterGuards:
    guards = DrafterGuards(drafter, group, WorkerRanks(RankLink(0, 2), group).without_sums)
    limits = Limits(max_requests=4, max_batched_tokens=16, max_len=32, max_drafts=2, vocab_size=64)
    guards.bind([], limits, torch.device("cpu"), lambda: lambda admissions: pytest.fail("no slot is filled"))
    return guards


class SummingDrafter(Drafter):
    name, max_drafts = "summing", 2

    def __init__(self, group: WatchedRanks) -> None:
        self._group = group

    def admit(self, admissions: list[Admission]) -> None:
        self._group.sum(torch.ones(2))

    def propose(self, step: Step) -> Drafts:
        raise NotImplementedError


def test_a_drafter_of_a_user_runs_no_sum() -> None:
    inner = CountedRanks()
    group = WatchedRanks(inner, RankStatus([0] * STATUS_FIELDS))
    guards = guarded(SummingDrafter(group), group)
    guards.admit([])
    assert inner.num_sums == 0
    (fault,) = guards.report(()).faults
    assert "a drafter of your own cannot run layers of the target" in fault.message
    assert group.sum(torch.ones(2)).tolist() == [2, 2], "the engine's own sums go on"


def test_a_drafter_of_the_package_that_fails_on_a_rank_fails_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, admissions: list[Admission]) -> None:
        raise ArithmeticError("no drafts")

    monkeypatch.setattr(NgramDrafter, "admit", fail)
    group = WatchedRanks(CountedRanks(), RankStatus([0] * STATUS_FIELDS))
    with pytest.raises(ArithmeticError, match="no drafts"):
        guarded(NgramDrafter(2), group).admit([])
    DrafterGuards(NgramDrafter(2)).admit([])
