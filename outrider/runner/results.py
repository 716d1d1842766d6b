"""From a step's device tensors to a StepResult: the one place where the host reads the device."""

from __future__ import annotations

from outrider.core import Finish, RequestResult, ScheduledBatch, StepResult, TokenLogprobs
from outrider.runner.step import DeviceResult
from outrider.sample.logprobs import to_host

NAN_LOGITS = (
    "the model's logits are not finite, or no token is allowed: check the weights, logit_bias and allowed_token_ids"
)


def read_result(scheduled: ScheduledBatch, result: DeviceResult, seconds: float) -> StepResult:
    counts, runs = result.counts.tolist(), result.run.tolist()
    logprobs = None if result.logprobs is None else result.logprobs.to("cpu")
    prompts = None if result.prompt_logprobs is None else result.prompt_logprobs.rows.to("cpu")
    requests: list[RequestResult] = []
    logit_row = prompt_row = 0
    for i in range(scheduled.num_requests):
        params = scheduled.params[i]
        run_len, finish, computed, drafted, accepted, proposed = counts[i]
        num_logit_rows = 1 + scheduled.num_drafts[i] if scheduled.samples[i] else 0
        own_logprobs: list[TokenLogprobs] | None = None
        if logprobs is not None and params.logprobs is not None:
            own_logprobs = to_host(logprobs, logit_row, logit_row + run_len, params.logprobs)
        own_prompt: list[TokenLogprobs] | None = None
        if result.prompt_logprobs is not None and prompts is not None and params.prompt_logprobs is not None:
            count = result.prompt_logprobs.counts[i]
            own_prompt = to_host(prompts, prompt_row, prompt_row + count, params.prompt_logprobs)
            prompt_row += count
        logit_row += num_logit_rows
        requests.append(
            RequestResult(
                scheduled.request_ids[i], scheduled.epochs[i], runs[i][:run_len], computed, drafted, accepted,
                proposed, Finish(finish), own_logprobs, own_prompt, NAN_LOGITS if finish == Finish.ERROR else None,
            )  # fmt: skip
        )
    flags = [] if result.written is None else result.written.tolist()
    writes = [*scheduled.checkpoints, *scheduled.folds]
    written = [write.id for write, was_written in zip(writes, flags, strict=True) if was_written]
    return StepResult(scheduled.step, requests, seconds, written)
