"""`outrider bench steps`: lists the numbers of drafts in the steps of each round, and the content of the slowest steps.

The time of a step begins at the end of the previous step, or when the step was scheduled if that was later."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from outrider.core import ScheduledBatch, StepResult, Uncaptured
from outrider.engine.step_watcher import UntracedSteps

if TYPE_CHECKING:
    from outrider.sched.scheduler import Scheduler


class StepShape(NamedTuple):
    """The size of a step: its tokens, requests and drafts."""

    num_requests: int
    num_prompt_tokens: int
    num_token_rows: int
    num_drafts: int  # most checked drafts of a request
    num_wanted: int  # most drafts of a request that were proposed for the next step

    @classmethod
    def from_batch(cls, batch: ScheduledBatch) -> StepShape:
        parts = zip(batch.num_known, batch.samples, strict=True)
        num_prompt_tokens = sum([known for known, samples in parts if known > 1 or not samples])
        return cls(batch.num_requests, num_prompt_tokens, batch.num_token_rows, max(batch.num_drafts, default=0),
                   batch.drafting.num_wanted)

    @property
    def kind(self) -> tuple[bool, int, int]:
        """Return a key that is equal for steps whose times can be compared."""
        return self.num_prompt_tokens > 0, self.num_drafts, self.num_wanted

    def __str__(self) -> str:
        prompts = f", {self.num_prompt_tokens} of prompts" if self.num_prompt_tokens else ""
        return (f"{self.num_requests} requests, {self.num_token_rows} token rows{prompts}, "
                f"{self.num_drafts} drafts checked, {self.num_wanted} proposed")


@dataclass(frozen=True)
class RecordedStep:
    shape: StepShape
    seconds: float
    uncaptured: Uncaptured | None  # why no captured step was replayed
    is_first: bool  # of so many requests and token rows in this engine

    @property
    def reason(self) -> str:
        form = "captured" if self.uncaptured is None else f"uncaptured ({self.uncaptured.value})"
        return f"{form}, the first of its size" if self.is_first else form


class StepRecorder(UntracedSteps):
    """Records all steps of an engine. It is set as the engine's tracer."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._steps: list[RecordedStep] = []
        self._in_flight: dict[int, tuple[StepShape, float]] = {}  # by step, with the time of its schedule
        self._sizes: set[tuple[int, int]] = set()  # requests and token rows that were met
        self._last_end = 0.0

    def schedule(self, scheduler: Scheduler) -> ScheduledBatch | None:
        began = self._clock()
        batch = scheduler.schedule()
        if batch is not None:
            self._in_flight[batch.step] = StepShape.from_batch(batch), began
        return batch

    def finish(self, result: StepResult) -> None:
        now = self._clock()
        known = self._in_flight.pop(result.step, None)
        if known is None:  # it was scheduled before this recorder was there
            return
        shape, began = known
        size = shape.num_requests, shape.num_token_rows
        self._steps.append(RecordedStep(shape, now - max(began, self._last_end), result.uncaptured,
                                        size not in self._sizes))
        self._sizes.add(size)
        self._last_end = now

    def take(self) -> list[RecordedStep]:
        """The steps since the last call."""
        steps, self._steps = self._steps, []
        return steps


def list_steps(steps: Sequence[RecordedStep], num_slowest: int) -> tuple[list[str], dict[str, Any]]:
    """Describe the steps of a round, as lines of text and as JSON."""
    decoding = Counter(step.shape.num_drafts for step in steps if not step.shape.num_prompt_tokens)
    num_prompts = len(steps) - decoding.total()
    slowest = sorted(enumerate(steps), key=lambda pair: -pair[1].seconds)[:num_slowest]
    drafts = ", ".join(f"{num_drafts} in {count}" for num_drafts, count in sorted(decoding.items()))
    lines = [f"  {num_prompts} steps with prompts; drafts of a request in the others: {drafts or 'none'}"]
    listed = []
    for index, step in slowest:
        usual = median([other.seconds for other in steps if other.shape.kind == step.shape.kind])
        times = step.seconds / max(usual, 1e-9)
        lines.append(f"  step {index}: {step.seconds * 1e3:.2f} ms, {times:.1f} times the usual; {step.shape}; "
                     f"{step.reason}")
        listed.append({"step": index, "ms": round(step.seconds * 1e3, 3), "usual_ms": round(usual * 1e3, 3),
                       **step.shape._asdict(), "reason": step.reason})
    counts = {str(num_drafts): count for num_drafts, count in sorted(decoding.items())}
    return lines, {"steps": len(steps), "steps_with_prompts": num_prompts, "drafts": counts, "slowest": listed}
