"""From one HTTP request to the engine and back: prompts in, changes of samples out.

The engine hands out growing outputs; a client wants what is new. A change holds everything that a sample gained since
the last one, be it one token or a hundred: runs have any length.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NamedTuple

from outrider.core.outputs import Logprob, RequestMetrics, RequestOutput
from outrider.core.params import SamplingParams
from outrider.core.pooling import RequestParams
from outrider.engine.async_llm import AsyncLLM
from outrider.server.metrics import RequestTimer, ServerMetrics

LOWEST = -9999.0  # JSON has no infinity


@dataclass(frozen=True)
class Ask:
    """One prompt of a request."""

    token_ids: list[int]
    params: RequestParams
    priority: int = 0
    cache_salt: str | None = None

    @property
    def num_samples(self) -> int:
        return self.params.n if isinstance(self.params, SamplingParams) else 1

    @property
    def prompt(self) -> dict[str, Any]:
        return {"prompt_token_ids": self.token_ids, "cache_salt": self.cache_salt}


class Change(NamedTuple):
    choice: int  # its index
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None


class ChangeReader:
    """Compares a growing output with what was read of it before. `first_index`: of the choice of its first sample."""

    def __init__(self, num_samples: int, first_index: int = 0) -> None:
        self._first_index = first_index
        self._num_chars = [0] * num_samples
        self._num_tokens = [0] * num_samples
        self._is_done = [False] * num_samples

    def read(self, output: RequestOutput) -> list[Change]:
        changes = []
        for i, sample in enumerate(output.outputs):
            if self._is_done[i] or (len(sample.text) == self._num_chars[i] and sample.finish_reason is None):
                continue  # tokens that are no text yet wait for those that complete it
            num_chars, num_tokens = self._num_chars[i], self._num_tokens[i]
            logprobs = None if sample.logprobs is None else sample.logprobs[num_tokens:]
            changes.append(Change(self._first_index + i, sample.text[num_chars:], sample.token_ids[num_tokens:],
                                  logprobs, sample.finish_reason, sample.stop_reason))
            self._num_chars[i], self._num_tokens[i] = len(sample.text), len(sample.token_ids)
            self._is_done[i] = sample.finish_reason is not None
        return changes


class Usage:
    """Tokens of a request so far, over all its prompts and samples."""

    def __init__(self, asks: Sequence[Ask]) -> None:
        self._num_prompt = sum(len(ask.token_ids) for ask in asks)
        self._last: dict[int, RequestOutput] = {}

    def update(self, prompt_index: int, output: RequestOutput) -> None:
        self._last[prompt_index] = output

    def to_json(self) -> dict[str, Any]:
        outputs = self._last.values()
        num_completion = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
        return {"prompt_tokens": self._num_prompt, "completion_tokens": num_completion,
                "total_tokens": self._num_prompt + num_completion,
                "prompt_tokens_details": {"cached_tokens": sum(o.metrics.num_cached_tokens for o in outputs)}}

    def metrics_to_json(self) -> dict[str, Any]:
        return {"speculative_decoding": drafts_to_json([output.metrics for output in self._last.values()])}


def drafts_to_json(metrics: Sequence[RequestMetrics]) -> dict[str, Any]:
    """How a request's drafts fared, under the names that vLLM and its readers use."""
    steps, drafted = sum(m.num_steps for m in metrics), sum(m.num_draft_tokens for m in metrics)
    accepted = sum(m.num_accepted_tokens for m in metrics)
    longest = max((len(m.accepted_per_position) for m in metrics), default=0)
    by_position = [sum(m.accepted_per_position[i] for m in metrics if i < len(m.accepted_per_position))
                   for i in range(longest)]
    return {"mean_acceptance_length": 1 + accepted / steps if steps else 0.0,
            "draft_acceptance_rate": accepted / drafted if drafted else 0.0, "num_spec_steps": steps,
            "num_draft_tokens": drafted, "num_accepted_draft_tokens": accepted,
            "num_accepted_tokens_per_pos": by_position}


async def generate(llm: AsyncLLM, asks: Sequence[Ask], request_id: str,
                   metrics: ServerMetrics) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Outputs with the index of their prompt. Closing the generator aborts every prompt."""
    streams = []
    for i, ask in enumerate(asks):
        assert isinstance(ask.params, SamplingParams)
        outputs = llm.generate(ask.prompt, ask.params, request_id=f"{request_id}-{i}", priority=ask.priority)
        streams.append(_timed(outputs, metrics.timer(len(ask.token_ids), ask.params)))
    if len(streams) == 1:
        async with aclosing(streams[0]) as outputs:
            async for output in outputs:
                yield 0, output
    else:
        async with aclosing(_merged(streams)) as pairs:
            async for pair in pairs:
                yield pair


async def _timed(outputs: AsyncGenerator[RequestOutput, None],
                 timer: RequestTimer) -> AsyncGenerator[RequestOutput, None]:
    try:
        async with aclosing(outputs):
            async for output in outputs:
                timer.observe(output)
                yield output
    finally:
        timer.close()


async def _merged(streams: Sequence[AsyncIterator[RequestOutput]]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    # Bounded: what is not read yet grows in the engine's streams and not here.
    ready: asyncio.Queue[tuple[int, RequestOutput] | BaseException | None] = asyncio.Queue(len(streams))

    async def pump(index: int, stream: AsyncIterator[RequestOutput]) -> None:
        try:
            async for output in stream:
                await ready.put((index, output))
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
            await stream.aclose()  # type: ignore[attr-defined]


def top_logprobs(entry: dict[int, Logprob], most: int) -> list[Logprob]:
    """The likeliest tokens of one position, by rank."""
    ranked = sorted((value for value in entry.values() if value.rank is not None), key=lambda value: value.rank or 0)
    return ranked[:most]


def finite(logprob: float) -> float:
    return max(logprob, LOWEST)
