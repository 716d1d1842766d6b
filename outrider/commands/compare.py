"""Two runs of one request that part: where, with which scores, and whether that is a near-tie or a fault.

A near-tie: on the common prefix the two tokens' scores lie within a tolerance in both runs, and no logit of that step
differs between the runs by more. Anything else is a fault. Scores are log-probabilities (logits up to a constant of the
step), and for sampled requests divided by the temperature with the noise of their key added.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import torch

from outrider.commands.drive import Ask
from outrider.core import RequestResult, ScheduledBatch, StepResult
from outrider.engine.text import Tokenizer
from outrider.runner.runner import Runner
from outrider.sample.philox import gumbel

TOLERANCE = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 0.1, "float16": 0.02}  # calibrated once


def first_difference(reference: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]) -> tuple[int, int] | None:
    """(request, position) of the first request that differs."""
    for index, (theirs, ours) in enumerate(zip(reference, tokens, strict=True)):
        if list(theirs) != list(ours):
            shorter = min(len(theirs), len(ours))
            return index, next((i for i in range(shorter) if theirs[i] != ours[i]), shorter)
    return None


class Recorder:
    """A runner around a runner: keeps one position's log-probabilities of one request, and what was chosen there.

    Positions count from the prompt's first token. The results go on without log-probabilities, which are many."""

    def __init__(self, inner: Runner, request_id: int, position: int) -> None:
        self.token: int | None = None
        self.logprobs: dict[int, float] = {}
        self._inner = inner
        self._request_id = request_id
        self._position = position
        self._known: dict[int, int] = {}  # tokens known, by epoch

    def submit(self, batch: ScheduledBatch) -> Future[StepResult]:
        row_of = dict(zip(batch.rows, zip(batch.request_ids, batch.epochs, strict=True), strict=True))
        for admission in batch.admissions:
            request_id, epoch = row_of.get(admission.row, (None, 0))
            if request_id == self._request_id:
                self._known[epoch] = len(admission.token_ids)
        return _Slim(self, self._inner.submit(batch))

    def close(self) -> None:
        self._inner.close()

    def take(self, result: StepResult) -> StepResult:
        for part in result.requests:
            if part.request_id == self._request_id:
                self._record(part)
        return replace(result, requests=[part._replace(logprobs=None) for part in result.requests])

    def _record(self, part: RequestResult) -> None:
        start = self._known[part.epoch]
        self._known[part.epoch] = start + len(part.run)
        at = self._position - start
        if 0 <= at < len(part.run) and part.logprobs is not None:
            entry = part.logprobs[at]
            self.token = part.run[at]
            self.logprobs = dict(zip(entry.token_ids, entry.logprobs, strict=True))


class _Slim(Future[StepResult]):
    """A step whose result is read, and recorded, when it is asked for: a step on CUDA is not done by itself."""

    def __init__(self, recorder: Recorder, inner: Future[StepResult]) -> None:
        super().__init__()
        self._recorder = recorder
        self._inner = inner

    def result(self, timeout: float | None = None) -> StepResult:
        if not self.done():
            self.set_result(self._recorder.take(self._inner.result(timeout)))
        return super().result()


@dataclass(frozen=True)
class Difference:
    request: int
    position: int  # of the outputs
    is_greedy: bool
    tokens: tuple[int | None, int | None]  # the reference's, the other's
    scores: tuple[tuple[float, float], tuple[float, float]]  # per run: of the reference's token, of the other's
    largest: float  # difference of any logit of the step between the runs
    tolerance: float
    is_near_tie: bool


def explain(index: int, position: int, ask: Ask, reference: Recorder, other: Recorder, dtype: str) -> Difference:
    tolerance = TOLERANCE[dtype]
    ours, theirs = reference.token, other.token
    if ours is None or theirs is None or ours == theirs:
        # One run ended earlier, or the difference did not come again: no arithmetic explains that.
        nan = (float("nan"), float("nan"))
        return Difference(index, position, ask.params.is_greedy, (ours, theirs), (nan, nan), float("nan"), tolerance,
                          False)
    noise = noise_of(ask, len(ask.token_ids) + position, (ours, theirs))
    heat = ask.params.temperature or 1.0
    first, second = ((run.logprobs[ours] / heat + noise[0], run.logprobs[theirs] / heat + noise[1])
                     for run in (reference, other))
    largest = _largest_change(reference.logprobs, other.logprobs)
    is_tie = all(abs(a - b) <= tolerance for a, b in (first, second)) and largest <= tolerance
    pair = (ours, theirs)
    return Difference(index, position, ask.params.is_greedy, pair, (first, second), largest, tolerance, is_tie)


def noise_of(ask: Ask, position: int, tokens: Sequence[int]) -> list[float]:
    """What the sampler adds to these tokens' logits there."""
    if ask.params.is_greedy:
        return [0.0] * len(tokens)
    seed, index, at = (torch.tensor([value]) for value in (ask.params.seed or 0, 0, position))
    return gumbel(seed, index, at, torch.tensor(tokens), len(tokens), torch.float32)[0].tolist()


def _largest_change(one: dict[int, float], two: dict[int, float]) -> float:
    """Of any logit between two runs. The runs' normalisers may differ, which changes all alike and no choice."""
    changes = [one[token] - two[token] for token in one.keys() & two.keys()]
    middle = statistics.median(changes)
    return max(abs(change - middle) for change in changes)


def describe(found: Difference, tokenizer: Tokenizer | None) -> str:
    def name(token: int | None) -> str:
        if token is None:
            return "no token (the run had ended)"
        text = "" if tokenizer is None else f" {tokenizer.decode([token], skip_special_tokens=False)!r}"
        return f"{token}{text}"

    kind = "greedy" if found.is_greedy else "sampled"
    first, second = found.tokens
    head = f"request {found.request} ({kind}), output token {found.position}: "
    if first is None or second is None:
        return head + f"reference {name(first)}, here {name(second)}: a fault"
    if first == second:
        return head + "the difference did not come again when both runs were repeated: a fault"
    (a, b), (c, d) = found.scores
    verdict = "a near-tie of arithmetic" if found.is_near_tie else "a fault"
    return (head + f"reference {name(first)}, here {name(second)}\n"
            f"  scores of the two tokens: reference {a:.6f} and {b:.6f} (apart {a - b:+.2e}), "
            f"here {c:.6f} and {d:.6f} (apart {c - d:+.2e})\n"
            f"  largest change of any logit of this step {found.largest:.2e}, tolerance {found.tolerance:g}: {verdict}")
