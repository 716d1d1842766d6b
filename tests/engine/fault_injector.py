"""FaultInjector: makes an engine fail at a chosen place, by chance or whenever a chosen request is in the batch.

It wraps the places where a step can fail: on the host before it is queued, in everything that is told to the device,
in the forward, the sampler, the drafter and the reading of the result, each before and after it has had its effect.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from outrider.core import ScheduledBatch
from outrider.engine.output import SampleOutput
from outrider.runner import local
from outrider.runner.batch import PackedBatch
from tests.engine.harness import Rig


class Injected(RuntimeError):
    """As anything that may go wrong in a step."""


@dataclass(frozen=True)
class Fault:
    """`countdown` calls of the place pass; then it fails, once or, with a culprit, whenever that request is in the
    batch with at least `position` tokens."""

    place: str
    countdown: int = 0
    culprit: int | None = None  # the scheduler's request id
    position: int = 0

    def strikes(self, batch: ScheduledBatch) -> bool:
        if self.culprit is None:
            return True
        bounds = dict(zip(batch.request_ids, batch.bounds, strict=True))
        return bounds.get(self.culprit, -1) >= self.position


class FaultInjector:
    def __init__(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        self._rig, self._patch = rig, monkeypatch
        self._fault: Fault | None = None
        self._passed = 0
        self._of_thread = threading.local()  # the host is ahead of the device: `batch` is what either works on
        self.num_injected: Counter[str] = Counter()
        self.places: list[str] = []
        step, runner = rig.step, rig.runner
        run = runner._run

        def run_noted(batch: ScheduledBatch, packed: PackedBatch) -> Any:
            self._of_thread.batch = batch
            return run(batch, packed)

        monkeypatch.setattr(runner, "_run", run_noted)
        self._wrap("host writes", step, "apply_host_writes")
        self._wrap("admission", step.state, "admit")
        self._wrap("sampling rows", step.state.sampling, "admit")
        self._wrap("page writes", step.state, "write_pages")
        self._wrap("recurrent admission", step.recurrent, "admit")
        self._wrap("forward", step, "forward")
        self._wrap("sampler", step, "finish")
        self._wrap("commit", step, "commit")
        if step.recurrent.layers:
            self._wrap("fold", step.recurrent, "fold")
        if step.drafter is not None:
            self._wrap("drafter admission", step.drafting, "admit")
            self._wrap("draft", step, "draft")
        self._wrap("result", local, "read_result")
        self._wrap("submit", runner, "submit", of_host=True)
        self._wrap("emit", SampleOutput, "take", of_host=True)

    def arm(self, fault: Fault | None) -> None:
        self._fault, self._passed = fault, 0

    def _wrap(self, place: str, owner: Any, name: str, of_host: bool = False) -> None:
        inner: Callable[..., Any] = getattr(owner, name)
        before, after = f"before {place}", f"after {place}"
        self.places += [before] if of_host else [before, after]

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if name == "submit":
                self._of_thread.batch = args[0]
            self._maybe_fail(before)
            result = inner(*args, **kwargs)
            self._maybe_fail(after)
            return result

        self._patch.setattr(owner, name, wrapped)

    def _maybe_fail(self, place: str) -> None:
        fault = self._fault
        if fault is None or fault.place != place or not fault.strikes(self._of_thread.batch):
            return
        self._passed += 1
        if self._passed <= fault.countdown:
            return
        if fault.culprit is None:
            self._fault = None
        self.num_injected[place] += 1
        raise Injected(place)
