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
    """A read-only view of the batch that the scheduler is building. A `Speculation` reads it in `take_orders`, to make
    the orders about drafts for this batch."""

    @property
    def requests(self) -> Sequence[DraftedRequest]: ...

    @property
    def num_drafts(self) -> Sequence[int]:
        """For each of the requests, the number of drafts that the batch checks."""

    @property
    def only_decodes(self) -> bool:
        """Whether every request of the batch computes exactly one known token and samples the next one."""


RequestUpdate: TypeAlias = tuple[DraftedRequest, RequestResult]  # a request and its part of a settled step


class Speculation(ABC):
    """Decides how many drafts each request gets in each step. For each step, the scheduler calls `plan` once and then
    `take_orders`."""

    @property
    @abstractmethod
    def makes_drafts(self) -> bool:
        """Whether any request may get drafts."""

    @abstractmethod
    def plan(self, requests: Sequence[DraftedRequest], *, is_exact: bool, has_prompts: bool) -> Sequence[int]:
        """Return, for each running request, the most drafts that the next step may check. is_exact: whether no step is
        in flight, so that the number of drafts that wait on the device is known. has_prompts: whether waiting requests
        may start."""

    @abstractmethod
    def take_orders(self, batch: DraftedBatch, started: Sequence[DraftedRequest]) -> DraftOrders:
        """Return the worker's orders about drafts in the planned step, such as how many new drafts to propose. started:
        requests that start in this step."""

    @abstractmethod
    def observe(self, batch: ScheduledBatch, result: StepResult, updates: Sequence[RequestUpdate],
                seconds: float | None) -> None:
        """Learn from a step whose result has been applied to the requests. seconds: time since the end of the step
        before; None if the engine had no requests in between."""

    @abstractmethod
    def leave_row(self, request: DraftedRequest) -> None:
        """Note that a request is about to give up its batch row, because it has ended or is preempted."""

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
