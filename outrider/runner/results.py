"""From a step's device tensors to a StepResult: the one place where the host reads the device."""

from __future__ import annotations

from dataclasses import replace

from outrider.core import Finish, RequestResult, ScheduledBatch, StepResult, TokenLogprobs, Uncaptured
from outrider.core.params import SamplingParams
from outrider.runner.rows import RowParams
from outrider.runner.step import DeviceResult, RowCheckpoints
from outrider.sample.logprobs import HostLogprobs, to_host

NAN_LOGITS = (
    "the model's logits are not finite, or no token is allowed: check the weights, logit_bias and allowed_token_ids"
)


FINISHES = tuple(Finish(code) for code in range(len(Finish)))  # an enum's own look-up takes longer


def read_result(scheduled: ScheduledBatch, result: DeviceResult, seconds: float,
                uncaptured: Uncaptured | None = None) -> StepResult:
    """uncaptured: why the step replayed no captured one, if it did not."""
    # Counts and runs are padded.
    parts = zip(scheduled.request_ids, scheduled.epochs, result.counts.tolist(), result.run.tolist(), strict=False)
    requests = [
        RequestResult(request_id, epoch, run[:length], computed, drafted, accepted, proposed, FINISHES[finish],
                      None, None, NAN_LOGITS if finish == Finish.ERROR else None)
        for request_id, epoch, (length, finish, computed, drafted, accepted, proposed), run in parts
    ]  # fmt: skip
    if result.params is not None:
        requests = _with_logprobs(scheduled, result, result.params, requests)
    return StepResult(scheduled.step, requests, seconds, _written(scheduled, result), uncaptured)


def with_asked_logprobs(result: DeviceResult, batch: ScheduledBatch, params: RowParams) -> DeviceResult:
    """A captured step reports for whoever asks; the parameters of the batch say who did."""
    if not params.logprobs_of(batch.rows):
        return replace(result, logprobs=None)
    return replace(result, params=params.of_rows(batch.rows))


def _with_logprobs(scheduled: ScheduledBatch, result: DeviceResult, asked: list[SamplingParams],
                   plain: list[RequestResult]) -> list[RequestResult]:
    logprobs = None
    if result.logprobs is not None:
        nums = [params.logprobs for params in asked if params.logprobs is not None]
        logprobs = HostLogprobs(result.logprobs.to("cpu"), min(nums) if min(nums) < 0 else max(nums))
    prompts = None if result.prompt_logprobs is None else result.prompt_logprobs.rows.to("cpu")
    requests: list[RequestResult] = []
    logit_row = prompt_row = 0
    for i, part in enumerate(plain):
        params = asked[i]
        own_logprobs: list[TokenLogprobs] | None = None
        if logprobs is not None and params.logprobs is not None:
            own_logprobs = logprobs.between(logit_row, logit_row + len(part.run), params.logprobs)
        own_prompt: list[TokenLogprobs] | None = None
        if result.prompt_logprobs is not None and prompts is not None and params.prompt_logprobs is not None:
            count = result.prompt_logprobs.counts[i]
            own_prompt = to_host(prompts, prompt_row, prompt_row + count, params.prompt_logprobs)
            prompt_row += count
        logit_row += 1 + scheduled.num_drafts[i] if scheduled.samples[i] else 0
        requests.append(part._replace(logprobs=own_logprobs, prompt_logprobs=own_prompt))
    return requests


def _written(scheduled: ScheduledBatch, result: DeviceResult) -> list[int]:
    """Ids of the checkpoints that were."""
    flags = result.written.tolist()
    if isinstance(result.checkpoints, RowCheckpoints):
        index_of = {row: i for i, row in enumerate(scheduled.rows)}
        flags = [flags[index_of[write.row]] for write in scheduled.checkpoints]
    writes = [*scheduled.checkpoints, *scheduled.folds]
    flags += result.folded.tolist()
    return [write.id for write, was_written in zip(writes, flags, strict=True) if was_written]
