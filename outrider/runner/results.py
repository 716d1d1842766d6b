"""Turns a step's device tensors into a StepResult. This is the one place where the host reads the device."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from outrider.core import Finish, RequestResult, ScheduledBatch, StepResult, TokenLogprobs, Uncaptured
from outrider.core.lazy_exports import LateModule
from outrider.core.params import NO_TOKEN
from outrider.kernels.step import FAULT, FAULT_VALUE, WrongValue
from outrider.runner.plan import RowCheckpoints
from outrider.runner.row_state import RowParams
from outrider.runner.step import DeviceResult
from outrider.sample.logprobs import HostLogprobs, to_host

if TYPE_CHECKING:
    from outrider.runner import prompt_reports
else:
    prompt_reports = LateModule("outrider.runner.prompt_reports")

FINISHES = tuple(Finish(code) for code in range(len(Finish)))  # an enum's own look-up takes longer
ERROR = int(Finish.ERROR)


def read_result(scheduled: ScheduledBatch, result: DeviceResult, seconds: float,
                uncaptured: Uncaptured | None = None) -> StepResult:
    """Read a step's result from the device. uncaptured: the reason why the step ran without a graph, if it did."""
    counts, nothing = result.counts.tolist(), [None] * scheduled.num_requests
    # Counts and runs are padded.
    parts = zip(scheduled.request_ids, scheduled.epochs, counts, result.run.tolist(),
                _run_logprobs(scheduled, result, counts) or nothing,
                _prompt_logprobs(result) or nothing, strict=False)
    requests = [
        RequestResult(request_id, epoch, run[:length], computed, drafted, accepted, proposed, FINISHES[finish],
                      logprobs, prompt, NO_TOKEN if finish == ERROR else None, None, levels)
        for request_id, epoch, (length, finish, computed, drafted, accepted, proposed, _, _, levels), run, logprobs,
        prompt in parts
    ]
    if result.failures:
        requests = [part._replace(error=result.failures.get(index, NO_TOKEN)) if part.finish is Finish.ERROR else part
                    for index, part in enumerate(requests)]
    if result.hidden is not None:
        requests = prompt_reports.with_hidden(requests, result.hidden)
    done = StepResult(scheduled.step, requests, seconds, _written(scheduled, result), uncaptured)
    if not result.drafting:
        return done
    faults = [WrongValue.from_code(own[FAULT], own[FAULT_VALUE]) for own in counts if own[FAULT]]
    return replace(done, drafting=result.drafting.report(faults))


def with_asked_logprobs(result: DeviceResult, batch: ScheduledBatch, params: RowParams) -> DeviceResult:
    """Drop the log-probabilities of a captured step if no request of the batch asked for them. Otherwise add the
    requests' parameters, which say how many each of them asked for."""
    if not params.logprobs_of(batch.rows):
        return replace(result, logprobs=None)
    return replace(result, params=params.of_rows(batch.rows))


def _run_logprobs(scheduled: ScheduledBatch, result: DeviceResult,
                  counts: list[list[int]]) -> list[list[TokenLogprobs] | None] | None:
    """Return each request's log-probabilities of the tokens that the step added; None for a request that did not ask
    for them."""
    if not result.params or result.logprobs is None:
        return None
    nums = [params.num_reported for params in result.params]
    asked = [num for num in nums if num is not None]
    num_drafts = scheduled.num_drafts
    if scheduled.drafting.sharing is not None and result.shares_drafts:  # the device knows, and all of them were alive
        num_drafts = [own[3] for own in counts[: scheduled.num_requests]]
    sampled = [1 + drafts if samples else 0
               for drafts, samples in zip(num_drafts, scheduled.samples, strict=True)]  # logit rows
    host = HostLogprobs(result.logprobs.to("cpu"), min(asked) if min(asked) < 0 else max(asked), sum(sampled))
    reported: list[list[TokenLogprobs] | None] = []
    first = 0  # logit row
    for num, (length, *_), count in zip(nums, counts, sampled, strict=False):
        reported.append(None if num is None else host.between(first, first + length, num))
        first += count
    return reported


def _prompt_logprobs(result: DeviceResult) -> list[list[TokenLogprobs] | None] | None:
    """Return each request's log-probabilities of the prompt tokens that the step computed."""
    if not result.params or result.prompt_logprobs is None:
        return None
    rows = {num: own.to("cpu") for num, own in result.prompt_logprobs.rows.items()}
    reported: list[list[TokenLogprobs] | None] = []
    starts = dict.fromkeys(rows, 0)
    for params, count in zip(result.params, result.prompt_logprobs.counts, strict=False):
        num = params.prompt_logprobs
        if num is None or not count:
            reported.append(None if num is None else [])
            continue
        reported.append(to_host(rows[num], starts[num], starts[num] + count, num))
        starts[num] += count
    return reported


def _written(scheduled: ScheduledBatch, result: DeviceResult) -> list[int]:
    """Return the ids of the recurrent checkpoints that the step wrote."""
    flags = result.written.tolist()
    if isinstance(result.checkpoints, RowCheckpoints):
        index_of = {row: i for i, row in enumerate(scheduled.rows)}
        flags = [flags[index_of[write.row]] for write in scheduled.cache.checkpoints]
    writes = [*scheduled.cache.checkpoints, *scheduled.cache.folds]
    flags += result.folded.tolist()
    return [write.id for write, was_written in zip(writes, flags, strict=True) if was_written]
