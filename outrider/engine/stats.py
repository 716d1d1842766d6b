"""EngineStats: counts of an engine's steps, tokens and drafts since it started, and the log line that shows them.

Counts plain data only (batches and results), so a server can keep one without torch."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from itertools import zip_longest

from outrider.core import FaultRecord, RequestResult, ScheduledBatch, StepResult, Uncaptured
from outrider.core.drafter_faults import DrafterFault, FaultKind
from outrider.core.outputs import RequestMetrics, count_first
from outrider.engine.step_watcher import StepWatcher

log = logging.getLogger("outrider")

LOG_SECONDS = 10.0
STEP_TOKENS = (1, *(1 << power for power in range(3, 15)))  # bounds of the sizes that steps are counted by


@dataclass
class EngineStats:
    """Counts of an engine's steps, tokens and drafts. Here a *draft* is the sequence of one request's draft tokens in
    one step, and a position is an index in this sequence."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_computed_prompt_tokens: int = 0  # those that prefix hits did not provide, of requests that resumed too
    num_hit_tokens: int = 0  # prompt tokens that prefix hits provided, of requests that resumed too
    num_runs: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_acceptance_losses: int = 0  # how often drafts were no longer accepted after an update of the weights
    drafted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    chosen: list[int] = field(default_factory=list)  # how often k drafts were scheduled for a request that samples
    num_steps: int = 0
    num_step_tokens: int = 0  # tokens of all steps, drafts included
    steps_by_tokens: list[int] = field(default_factory=list)  # by the bounds of STEP_TOKENS
    uncaptured: Counter[Uncaptured] = field(default_factory=Counter)  # steps that replayed no captured one, by reason
    drafter_faults: Counter[tuple[str, FaultKind]] = field(default_factory=Counter)  # by drafter and kind
    drafters_off: Counter[tuple[str, str]] = field(default_factory=Counter)  # drafter and why it was switched off: 1

    def add(self, prompt_len: int, samples: int) -> None:
        self.num_requests += 1
        self.num_prompt_tokens += prompt_len * samples

    def observe_batch(self, batch: ScheduledBatch) -> None:
        for admission in batch.admissions:
            self.num_hit_tokens += admission.computed
            self.num_computed_prompt_tokens += max(0, admission.prompt_len - admission.computed)
        num_tokens, num_drafts = batch.num_tokens, batch.num_drafts
        if batch.drafting.sharing is not None:  # the device knows who gets how many: as if all got equally many
            num_tokens = batch.num_token_rows
            least, more = divmod(batch.drafting.sharing.total, batch.num_requests)
            num_drafts = [least + (index < more) for index in range(batch.num_requests)]
        self.num_step_tokens += num_tokens
        _count(self.steps_by_tokens, bisect_left(STEP_TOKENS, num_tokens))
        num_not_drafted = sum(batch.samples)
        for drafts, times in Counter(num_drafts).items():
            if drafts:  # only requests that sample have some
                _count(self.chosen, drafts, times)
                num_not_drafted -= times
        if num_not_drafted:
            _count(self.chosen, 0, num_not_drafted)

    def observe_step(self, result: StepResult) -> None:
        self.num_steps += 1
        if result.uncaptured is not None:
            self.uncaptured[result.uncaptured] += 1
        if result.drafting is not None and result.drafting.faults:
            self.observe_faults(result.drafting.faults)

    def observe_faults(self, faults: Iterable[DrafterFault]) -> None:
        for fault in faults:
            self.drafter_faults[fault.drafter, fault.kind] += 1
            if fault.switches_off:
                self.drafters_off[fault.drafter, fault.message] = 1

    def observe_runs(self, results: Iterable[RequestResult]) -> None:
        """Count the tokens and accepted drafts of a step's requests."""
        runs = [result for result in results if result.run]
        self.num_runs += len(runs)
        self.num_generation_tokens += sum([len(result.run) for result in runs])
        drafts = Counter([(result.num_drafted, result.num_accepted) for result in runs])
        for (num_drafted, num_accepted), times in drafts.items():
            if num_drafted:
                self.num_drafts += times
                self.num_draft_tokens += times * num_drafted
                self.num_accepted_tokens += times * num_accepted
                count_first(self.drafted_per_position, num_drafted, times)
                count_first(self.accepted_per_position, num_accepted, times)

    @property
    def mean_run_length(self) -> float:
        """Return the mean number of tokens that a step yields for one request, steps without drafts included."""
        return self.num_generation_tokens / self.num_runs if self.num_runs else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Return the mean number of tokens that a step yields for a request whose drafts it verifies."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def acceptance_rate(self) -> float:
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def acceptance_per_position(self) -> list[float]:
        """Return, for each position, the share of drafts that are accepted up to and including it, among the drafts
        that reach it."""
        accepted = self.accepted_per_position + [0] * len(self.drafted_per_position)
        return [hit / tried if tried else 0.0 for hit, tried in zip(accepted, self.drafted_per_position, strict=False)]

    @property
    def mean_chosen(self) -> float:
        total = sum(self.chosen)
        return sum(k * times for k, times in enumerate(self.chosen)) / total if total else 0.0

    @property
    def uncaptured_line(self) -> str:
        """Return a line for the log: how many steps ran without a captured graph, by reason."""
        reasons = ", ".join(f"{count} ({reason.value})" for reason, count in self.uncaptured.most_common())
        return f"Steps: {self.num_steps}, uncaptured: {reasons or 'none'}"

    @property
    def num_drafter_faults(self) -> int:
        return self.drafter_faults.total()

    def copy(self) -> EngineStats:
        return self.since(EngineStats())

    def since(self, before: EngineStats) -> EngineStats:
        """Return the counts that were added since an earlier copy."""
        result = EngineStats()
        for part in fields(self):
            now, then = getattr(self, part.name), getattr(before, part.name)
            setattr(result, part.name, _minus(now, then) if isinstance(now, list) else now - then)
        return result

    def plus(self, other: EngineStats) -> EngineStats:
        """Return the sum of both counts."""
        result = EngineStats()
        for part in fields(self):
            one, two = getattr(self, part.name), getattr(other, part.name)
            is_list = isinstance(one, list)
            both = [sum(counts) for counts in zip_longest(one, two, fillvalue=0)] if is_list else one + two
            setattr(result, part.name, both)
        return result

    def line(self) -> str:
        rates = ", ".join(f"{rate:.3f}" for rate in self.acceptance_per_position)
        return (
            f"Mean acceptance length: {self.mean_acceptance_length:.2f}, "
            f"Accepted/drafted: {self.num_accepted_tokens}/{self.num_draft_tokens}, "
            f"Per-position acceptance rate: {rates}, "
            f"Avg Draft acceptance rate: {self.acceptance_rate:.1%}, "
            f"Mean run: {self.mean_run_length:.2f}, Mean drafts chosen: {self.mean_chosen:.2f}, "
            f"Tokens: {self.num_prompt_tokens} prompt ({self.num_hit_tokens} hits), "
            f"{self.num_generation_tokens} generated" + self._faults_line()
        )

    def _faults_line(self) -> str:
        if not self.drafter_faults:
            return ""
        off = "".join(f", {drafter} is off: {reason}" for drafter, reason in self.drafters_off)
        return f", Drafter faults: {self.num_drafter_faults}{off}"


class StatsLog(StepWatcher):
    """Logs the counts since its last line, at most every ten seconds, and the totals when the engine ends."""

    def __init__(self, stats: EngineStats, clock: Callable[[], float] = time.monotonic) -> None:
        self._stats = stats
        self._clock = clock
        self._last = clock()
        self._before = stats.copy()

    def flush(self) -> None:
        now = self._clock()
        if now - self._last < LOG_SECONDS:
            return
        recent = self._stats.since(self._before)
        if recent.num_runs:
            log.info("%s", recent.line())
        self._last, self._before = now, self._stats.copy()

    def close(self) -> None:
        if self._stats.num_runs:
            log.info("totals since the start: %s", self._stats.line())


class HostFaultsWatcher(StepWatcher):
    """Adds the faults of a drafter that runs on the host to the stats."""

    def __init__(self, stats: EngineStats, record: FaultRecord) -> None:
        self._stats, self._record = stats, record

    def flush(self) -> None:
        self._stats.observe_faults(self._record.take())


def _count(counts: list[int], index: int, times: int = 1) -> None:
    counts += [0] * (index + 1 - len(counts))
    counts[index] += times


def _minus(now: list[int], before: list[int]) -> list[int]:
    left = [value - (before[i] if i < len(before) else 0) for i, value in enumerate(now)]
    while left and left[-1] == 0:
        left.pop()
    return left


def stamp_admissions(batch: ScheduledBatch, metrics_of: Callable[[int], RequestMetrics]) -> None:
    """Note the time at which requests are scheduled for the first time."""
    now, rows = time.perf_counter(), {admission.row for admission in batch.admissions}
    for request_id, row in zip(batch.request_ids, batch.rows, strict=True):
        if row in rows:
            metrics = metrics_of(request_id)
            if metrics.first_scheduled_time is None:
                metrics.first_scheduled_time = now
