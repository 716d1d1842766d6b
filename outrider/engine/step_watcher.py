"""StepWatcher follows an engine from step to step: a log of its counts, for one, or events of its cache. UntracedSteps
stands where a tracer of steps may stand."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.core import ScheduledBatch, StepResult
    from outrider.sched.scheduler import Scheduler


class StepWatcher:
    """Methods do nothing unless a watcher defines them. They are called where `Engine.step` is."""

    def follow(self, scheduler: Scheduler) -> None:
        """Follow a new scheduler, which replaces the engine's old one. Its cache is empty, and everything in the old
        cache is gone."""

    def flush(self) -> None:
        """Report what has happened since the last call. Called when a step is over or when the cache has changed
        between steps."""

    def close(self) -> None:
        """The engine ends. Called once."""


class UntracedSteps:
    """Takes batches from the scheduler and traces none."""

    def schedule(self, scheduler: Scheduler) -> ScheduledBatch | None:
        return scheduler.schedule()

    def finish(self, result: StepResult) -> None:
        """A step's result was read."""
