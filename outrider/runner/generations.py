"""Generations: cancels steps that were queued behind a failed one. A step that fails cancels all later steps of its
generation.

The host answers a failed step with a batch of a new generation, in which every request is admitted again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from outrider.core import ScheduledBatch
from outrider.runner.interface import StepCancelled
from outrider.runner.step import DeviceStep


class Generations:
    def __init__(self, step: DeviceStep) -> None:
        self._step = step
        self._current = 0
        self._has_failed = False

    @contextmanager
    def running(self, batch: ScheduledBatch) -> Iterator[None]:
        """A context for everything that a step does on the device. Raises StepCancelled if an earlier step of the same
        generation has failed."""
        if batch.mode.generation == self._current and self._has_failed:
            raise StepCancelled("a step before this one failed")
        try:
            if batch.mode.generation != self._current:
                self._current, self._has_failed = batch.mode.generation, False
                self._step.reset()
            yield
        except BaseException:
            self._has_failed = True
            raise
