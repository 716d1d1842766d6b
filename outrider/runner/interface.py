"""Runner: the interface between the engine and a worker. Only plain data passes through it: batches, results, and facts
about the worker. No torch here.

A worker can therefore live in this process or in a process of its own, and can be split over several ranks.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from outrider.cache.groups import CacheLayout
from outrider.core import Limits, ScheduledBatch, StepResult
from outrider.core.class_head import ClassHead
from outrider.core.costs import MixedStepCosts, StepCosts
from outrider.runner.commands import Answer, Command, Errand


class Runner(Protocol):
    """Runs steps in the order in which they are submitted. Arguments and results are plain data. When a step fails,
    later steps of its generation have no effect; most of them raise StepCancelled."""

    def submit(self, batch: ScheduledBatch) -> Future[StepResult]: ...

    def command(self, command: Command[Answer]) -> Future[Answer]:
        """Carry out a command after the steps submitted before it, and before those submitted after it."""

    def idle(self, quiet_seconds: float) -> float | None:
        """Prepare for later steps, a little at a time. Called when no step is in flight and none has come for
        `quiet_seconds`. Returns the seconds after which to call again; None: only after further steps."""

    def close(self) -> None: ...


class WorkerDied(RuntimeError):
    """The process that holds the device has ended, or the device is lost: no step can run any more."""


class NoDeviceMemory(ValueError):
    """Raised at start-up if the device has too little memory for the settings."""


class StepOutOfMemory(RuntimeError):
    """Raised if the device has no memory left for a step."""


class StepCancelled(RuntimeError):
    """Raised for a step that did not run because an earlier step had failed."""


@dataclass(frozen=True)
class NoDrafting:
    """No drafts are made, so every step decodes one token for each request."""


@dataclass(frozen=True)
class FixedDrafting:
    """Every request gets this many drafts in every step."""

    num_drafts: int


@dataclass(frozen=True)
class MeasuredDrafting:
    """The engine chooses the number of drafts in every step, from measured costs of steps."""

    max_drafts: int
    costs: StepCosts
    always_propose: bool  # a proposal costs nothing worth saving


@dataclass(frozen=True)
class UnboundedSteps:
    """A step computes as many prompt tokens as fit into it, however long it takes."""


@dataclass(frozen=True)
class BoundedSteps:
    """While requests decode, a step computes only as many prompt tokens as it can in `max_seconds`, so that decoding is
    not delayed."""

    max_seconds: float
    costs: MixedStepCosts


@dataclass(frozen=True)
class WorkerInfo:
    """A worker's description of itself for the engine, after it has loaded, measured and captured."""

    limits: Limits
    layout: CacheLayout
    num_pages: int
    lookahead: int  # slots past the computed tokens that the drafter writes
    drafting: NoDrafting | FixedDrafting | MeasuredDrafting
    eos_ids: tuple[int, ...]
    prompt_steps: UnboundedSteps | BoundedSteps = UnboundedSteps()
    takes_extra_keys: bool = False  # whether tokens may see keys after their own (`ExtraKeys`)
    device_name: str = "CPU"
    classes: ClassHead | None = None  # of a model that classifies and generates no text


class RunningWorker(Runner, Protocol):
    """A worker that has started, as the engine holds it."""

    @property
    def info(self) -> WorkerInfo: ...

    def begin(self, errand: Errand) -> Future[None]:
        """Make the worker do background work (`Errand`) beside its steps. Any thread may call this. The future raises
        ValueError if a rank could not do the work."""
