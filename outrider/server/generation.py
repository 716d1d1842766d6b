"""Runs the requests of one HTTP request on the engine, and turns the results into changes to send.

The engine yields increments. An increment is the output that one step added to one sample. A change is the part of a
sample that has not been sent to the client yet, from one token to hundreds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from math import isnan
from typing import Any, NamedTuple, TypeAlias, cast

from outrider.async_llm import AsyncLLM
from outrider.core.any_output import empty_output
from outrider.core.checked_request import CheckedRequest
from outrider.core.hidden_params import RequestParams
from outrider.core.outputs import (
    NO_EXTRAS,
    Logprob,
    OutputIncrement,
    RequestMetrics,
    RequestOutput,
    SampleEnd,
    name_logprobs,
)
from outrider.core.params import MAX_LOGPROBS_ALL, SamplingParams
from outrider.core.prompts import Prompt
from outrider.core.step_messages import TokenLogprobs
from outrider.lora_request import LoRARequest
from outrider.server.metrics import ServerMetrics
from outrider.server.protocol import SamplingFields
from outrider.server.work import compact, while_client_waits

LOWEST = -9999.0  # JSON has no infinity
Increments: TypeAlias = AsyncGenerator[tuple[int, list[OutputIncrement]], None]  # with the index of their prompt


class Change(NamedTuple):
    choice: int  # its index
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None
    stop_reason: int | str | None
    run_lengths: list[int]  # tokens of each step, if runs are kept; all but the last of a run are accepted drafts
    extras: Mapping[str, Any] = NO_EXTRAS  # what features add to a sample, with its end


def extra_fields(change: Change) -> str:
    """Write the values that features have added to a sample, as JSON fields of its choice."""
    return "".join(f",{compact(name)}:{compact(value)}" for name, value in change.extras.items())


NO_END = SampleEnd(None)
NO_RUNS: list[int] = []


class ChangeReader:
    """Turns increments into changes. `first_index`: the index of the first sample's choice. `has_text`: tokens become
    text; an engine without a tokenizer gives token ids alone. `keeps_runs`: changes contain the number of tokens of
    each step (run)."""

    def __init__(self, first_index: int = 0, *, has_text: bool = True, keeps_runs: bool = False) -> None:
        self._first_index, self._has_text, self._keeps_runs = first_index, has_text, keeps_runs
        self._runs: dict[int, list[int]] = {}  # by sample
        self._held: dict[int, OutputIncrement] = {}  # by sample: tokens that are no text yet

    def read(self, increments: Sequence[OutputIncrement]) -> list[Change]:
        changes = []
        if self._keeps_runs:
            for own in increments:
                self._runs.setdefault(own.sample.sample_index, []).append(len(own.token_ids))
        if len(increments) > 1:
            increments = _joined(increments)
        for increment in increments:
            key, token_ids, text, logprobs, end, _, _ = increment
            held = self._held.pop(key.sample_index, None) if self._held else None
            if held is not None:
                _, token_ids, text, logprobs, end, _, _ = increment = _join(held, increment)
            if not text and end is None and self._has_text:
                self._held[key.sample_index] = increment
                continue
            finish_reason, stop_reason, _, extras = end or NO_END
            runs = self._runs.pop(key.sample_index, []) if self._keeps_runs else NO_RUNS
            changes.append(Change(self._first_index + key.sample_index, text, token_ids, logprobs, finish_reason,
                                  stop_reason, runs, extras))
        return changes


def _joined(increments: Sequence[OutputIncrement]) -> list[OutputIncrement]:
    """Join all increments of a sample into one."""
    by_sample: dict[int, OutputIncrement] = {}
    for increment in increments:
        before = by_sample.get(increment.sample.sample_index)
        by_sample[increment.sample.sample_index] = increment if before is None else _join(before, increment)
    return list(by_sample.values())


def _join(one: OutputIncrement, other: OutputIncrement) -> OutputIncrement:
    logprobs = None
    if one.logprobs is not None or other.logprobs is not None:
        logprobs = [*(one.logprobs or ()), *(other.logprobs or ())]
    return OutputIncrement(one.sample, one.token_ids + other.token_ids, one.text + other.text, logprobs, other.end)


class Usage:
    """Counts the tokens of a request so far, over all its prompts and samples."""

    def __init__(self, requests: Sequence[CheckedRequest]) -> None:
        self._num_prompt = sum(len(request.token_ids) for request in requests)
        self._num_completion = 0
        self._metrics: dict[int, RequestMetrics] = {}  # by prompt; the engine's own

    def update(self, prompt_index: int, increments: Sequence[OutputIncrement]) -> None:
        for increment in increments:
            self._num_completion += len(increment.token_ids)
        self._metrics[prompt_index] = increments[0].sample.metrics

    def to_json(self) -> dict[str, Any]:
        num_cached = sum(own.num_cached_tokens for own in self._metrics.values())
        return {"prompt_tokens": self._num_prompt, "completion_tokens": self._num_completion,
                "total_tokens": self._num_prompt + self._num_completion,
                "prompt_tokens_details": {"cached_tokens": num_cached}}

    def field_of_chunk(self, body: SamplingFields) -> str:
        """Return the usage field of a stream's chunk: the tokens so far, or null if only the last chunk has them."""
        if body.wants_usage_always:
            return f',"usage":{compact(self.to_json())}'
        return ',"usage":null' if body.wants_usage else ""

    def count_completions(self, outputs: Sequence[RequestOutput]) -> None:
        """Count the tokens of outputs that were not streamed as increments."""
        self._num_completion = sum(output.num_output_tokens for output in outputs)

    def leave_out_completions(self) -> None:
        """Report no completion tokens. Called when the client asked for an empty completion, and the engine made a
        token anyway."""
        self._num_completion = 0

    def metrics_to_json(self) -> dict[str, Any]:
        return {"speculative_decoding": drafts_to_json(list(self._metrics.values()))}


def drafts_to_json(metrics: Sequence[RequestMetrics]) -> dict[str, Any]:
    """Return a request's numbers of drafts and accepted drafts, under vLLM's names."""
    steps, drafted = sum(m.num_steps for m in metrics), sum(m.num_draft_tokens for m in metrics)
    accepted = sum(m.num_accepted_tokens for m in metrics)
    longest = max((len(m.accepted_per_position) for m in metrics), default=0)
    by_position = [sum(m.accepted_per_position[i] for m in metrics if i < len(m.accepted_per_position))
                   for i in range(longest)]
    return {"mean_acceptance_length": 1 + accepted / steps if steps else 0.0,
            "draft_acceptance_rate": accepted / drafted if drafted else 0.0, "num_spec_steps": steps if drafted else 0,
            "num_draft_tokens": drafted, "num_accepted_draft_tokens": accepted,
            "num_accepted_tokens_per_pos": by_position}


async def checked(llm: AsyncLLM, prompts: Sequence[Prompt], params: RequestParams, priority: int,
                  adapter: LoRARequest | None, tenant: str | None) -> list[CheckedRequest]:
    """Check prompts with `llm.check`, which makes requests of them. Compiling a grammar may take long, so the check is
    cancelled if the client disconnects."""
    check = llm.check(prompts, params, priority, adapter, tenant)
    has_form = isinstance(params, SamplingParams) and params.structured_outputs is not None
    return await (while_client_waits(check) if has_form else check)


async def generate(llm: AsyncLLM, requests: Sequence[CheckedRequest], request_id: str,
                   metrics: ServerMetrics) -> Increments:
    """Yield increments with the index of their prompt. If the generator is closed, all prompts are aborted."""
    if len(requests) == 1:
        async with aclosing(_timed(llm, requests[0], request_id, metrics)) as parts:
            async for increments in parts:
                yield 0, increments
    else:
        streams = [_timed(llm, request, f"{request_id}-{i}", metrics) for i, request in enumerate(requests)]
        async with aclosing(_merged(streams)) as pairs:
            async for pair in pairs:
                yield pair


async def whole_outputs(parts: Increments, requests: Sequence[CheckedRequest], usage: Usage) -> list[RequestOutput]:
    """Run the requests to their ends, and return the finished output of each prompt."""
    outputs = [cast(RequestOutput, empty_output("", request)) for request in requests]
    async with aclosing(parts):
        async for i, increments in parts:
            usage.update(i, increments)
            for increment in increments:
                outputs[i].grow(increment)
    return outputs


async def _timed(llm: AsyncLLM, request: CheckedRequest, request_id: str,
                 metrics: ServerMetrics) -> AsyncGenerator[list[OutputIncrement], None]:
    timer = metrics.timer(request_id, len(request.token_ids), request.sampling)
    try:
        async with aclosing(llm.increments(request, request_id)) as parts:
            async for increments in parts:
                timer.observe(increments)
                yield increments
    finally:
        timer.close()


async def _merged(streams: Sequence[AsyncGenerator[list[OutputIncrement], None]]) -> Increments:
    # Bounded: what is not read yet grows in the engine's streams and not here.
    ready: asyncio.Queue[tuple[int, list[OutputIncrement]] | BaseException | None] = asyncio.Queue(len(streams))

    async def pump(index: int, stream: AsyncGenerator[list[OutputIncrement], None]) -> None:
        try:
            async for increments in stream:
                await ready.put((index, increments))
            await ready.put(None)
        except Exception as error:
            await ready.put(error)

    tasks = [asyncio.ensure_future(pump(i, stream)) for i, stream in enumerate(streams)]
    try:
        num_left = len(tasks)
        while num_left:
            match await ready.get():
                case None:
                    num_left -= 1
                case BaseException() as error:
                    raise error
                case pair:
                    yield pair
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


def top_token_ids(entry: dict[int, Logprob], most: int) -> list[int]:
    """Return the ids of the likeliest tokens at one position, by rank. most: how many; -1: all."""
    ranked = [token_id for token_id, value in entry.items() if value.rank is not None]
    ranked.sort(key=lambda token_id: entry[token_id].rank or 0)
    return ranked if most == MAX_LOGPROBS_ALL else ranked[:most]


def named_by_id(token_id: int) -> str:
    """Return the name of a token under `return_tokens_as_token_ids`. Tokens with equal text have different names."""
    return f"token_id:{token_id}"


def named(entries: Sequence[TokenLogprobs]) -> list[dict[int, Logprob]]:
    return [name_logprobs(entry) for entry in entries]


def finite(logprob: float | None) -> float | None:
    """Convert a log-probability to a JSON number. None (null) if there is none, or if the model's logits are not
    finite."""
    return None if logprob is None or isnan(logprob) else max(logprob, LOWEST)


def num_values(num_tokens: int, num_logprobs: int | None, vocab_size: int) -> int:
    """Count the values in an answer: `num_tokens` token ids, each with its log-probability and those of the likeliest
    `num_logprobs` tokens (-1: all; None: no log-probabilities). The time to write the answer grows with this number."""
    if num_logprobs is None:
        return num_tokens
    return num_tokens * (2 + (vocab_size if num_logprobs == MAX_LOGPROBS_ALL else min(num_logprobs, vocab_size)))


def answer_values(outputs: Sequence[RequestOutput], params: SamplingParams, vocab_size: int, *,
                  repeats_prompt: bool) -> int:
    """Count the token ids and log-probabilities that the answer to a request will contain. A large answer is written in
    a thread. All outputs come from requests with the same `params`."""
    num_output = sum(output.num_output_tokens for output in outputs)
    num_prompt = sum(len(output.prompt_token_ids or ()) * len(output.outputs) for output in outputs)
    if not repeats_prompt:
        num_prompt = 0
    extended = sum(len(output.prompt_token_ids or ()) for output in outputs
                   for sample in output.outputs if sample.extras)  # a feature may tell of the prompt
    return (extended + num_values(num_output, params.logprobs, vocab_size)
            + num_values(num_prompt, params.prompt_logprobs, vocab_size))
