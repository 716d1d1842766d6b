"""StepWatcher is called after every step of an engine, for example to log its counts or to publish events of its cache.
UntracedSteps takes the place of a tracer in an engine without one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.core import ScheduledBatch, StepResult
    from outrider.sched.scheduler import Scheduler


class StepWatcher:
    """The interface of watchers. A method does nothing unless a watcher defines it. All are called on the thread that
    calls `Engine.step`."""

    def follow(self, scheduler: Scheduler) -> None:
        """Watch a new scheduler from now on. It replaces the engine's old one; its cache is empty, and the pages of the
        old cache are gone."""

    def flush(self) -> None:
        """Report what has happened since the last call. Called after a step, and when the cache has changed between
        steps."""

    def close(self) -> None:
        """End the watcher, because the engine ends. Called once."""


class UntracedSteps:
    """Takes batches from the scheduler and traces none."""

    def schedule(self, scheduler: Scheduler) -> ScheduledBatch | None:
        return scheduler.schedule()

    def finish(self, result: StepResult) -> None:
        """Called when a step's result was read. Does nothing."""
