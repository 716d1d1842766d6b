"""Speculation: the interface by which the scheduler asks for drafts. `outrider/speculation/` implements it for engines
with a drafter; the implementation for an engine without a drafter is here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol, TypeAlias

from outrider.core import DraftOrders, RequestResult, ScheduledBatch, StepResult
from outrider.core.drafted_request import DraftedRequest


class DraftedBatch(Protocol):
    """A batch that is being made, as speculation sees it."""

    @property
    def requests(self) -> Sequence[DraftedRequest]: ...

    @property
    def num_drafts(self) -> Sequence[int]:
        """Drafts scheduled for each of the requests."""

    @property
    def only_decodes(self) -> bool:
        """Whether every request has one known token and samples."""


RequestUpdate: TypeAlias = tuple[DraftedRequest, RequestResult]  # a request and its part of a settled step


class Speculation(ABC):
    """Decides how many drafts each request gets in each step. A step is planned once, then its orders are taken."""

    @property
    @abstractmethod
    def makes_drafts(self) -> bool:
        """Whether any request may get drafts."""

    @abstractmethod
    def plan(self, requests: Sequence[DraftedRequest], *, is_exact: bool, has_prompts: bool) -> Sequence[int]:
        """The most drafts of each running request in the next step. is_exact: whether the number of drafts that wait on
        the device is known, because nothing is in flight. has_prompts: waiting requests may start in the step."""

    @abstractmethod
    def take_orders(self, batch: DraftedBatch, started: Sequence[DraftedRequest]) -> DraftOrders:
        """Take the orders about drafts for the planned step. started: the requests that start in the step."""

    @abstractmethod
    def observe(self, batch: ScheduledBatch, result: StepResult, updates: Sequence[RequestUpdate],
                seconds: float | None) -> None:
        """Learn from a step whose result has been applied to the requests. seconds: from the end of the step before,
        if nobody waited between."""

    @abstractmethod
    def leave_row(self, request: DraftedRequest) -> None:
        """Note that a request is about to give up its row, because it has ended or is preempted."""

    @abstractmethod
    def end(self, request: DraftedRequest) -> None:
        """Forget a request that has ended."""


class NoSpeculation(Speculation):
    """Gives no request any drafts."""

    @property
    def makes_drafts(self) -> bool:
        return False

    def plan(self, requests: Sequence[DraftedRequest], *, is_exact: bool, has_prompts: bool) -> Sequence[int]:
        return [0] * len(requests)

    def take_orders(self, batch: DraftedBatch, started: Sequence[DraftedRequest]) -> DraftOrders:
        return DraftOrders()

    def observe(self, batch: ScheduledBatch, result: StepResult, updates: Sequence[RequestUpdate],
                seconds: float | None) -> None:
        pass

    def leave_row(self, request: DraftedRequest) -> None:
        pass

    def end(self, request: DraftedRequest) -> None:
        pass


NO_SPECULATION = NoSpeculation()
