"""Beam search over HTTP: `use_beam_search` asks for the n likeliest answers instead of n samples."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import count
from typing import Any, cast

from outrider.async_llm import AsyncLLM
from outrider.beam_search import BeamSearchOutput, BeamSearchParams, beam_rounds, check_beam_params
from outrider.core import Limits
from outrider.core.any_output import empty_output
from outrider.core.checked_request import CheckedRequest
from outrider.core.outputs import CompletionOutput, RequestOutput
from outrider.core.params import SamplingParams
from outrider.engine.text import Tokenizer
from outrider.server.errors import ApiError, bad_value
from outrider.server.protocol import SamplingFields

# Sampling parameters that a beam search has too, or that change nothing of what it finds.
SERVED = ("n", "max_tokens", "temperature", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "seed",
          "speculative", "skip_reading_prefix_cache")
OTHERS = ("stream", "logprobs", "top_logprobs", "prompt_embeds", "return_run_lengths")  # fields that it does not have


def beam_sampling(body: SamplingFields, max_tokens: int | None, form: Any, limits: Limits) -> SamplingParams:
    """Make the sampling parameters for a body with `use_beam_search`. Fields that beam search does not support are
    refused. form: the body's structured output, which beam search does not support either; None without it."""
    default = SamplingParams()
    wrong = [name for name in SamplingParams.__dataclass_fields__.keys() - set(SERVED)
             if getattr(body, name, None) not in (None, getattr(default, name), [], "")]
    wrong += [name for name in OTHERS if getattr(body, name, None) not in (None, False)]
    if form is not None:
        wrong.append("structured_outputs")
    if wrong:
        raise ApiError(400, f"{min(wrong)} is not supported with use_beam_search: leave {min(wrong)} "
                            "out", param=min(wrong))
    try:
        check_beam_params(beam_params(body, max_tokens or 1), limits)
        return SamplingParams(n=body.n or 1, max_tokens=max_tokens)
    except ValueError as error:
        message = str(error).removeprefix("BeamSearchParams: ").replace("beam_width", "n")
        raise bad_value(ValueError(message), type(body).model_fields) from None


def beam_params(body: SamplingFields, max_tokens: int) -> BeamSearchParams:
    return BeamSearchParams(body.n or 1, max_tokens, ignore_eos=body.ignore_eos is True,
                            temperature=body.temperature or 0.0,
                            length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
                            include_stop_str_in_output=body.include_stop_str_in_output is True)


async def beam_outputs(llm: AsyncLLM, body: SamplingFields, requests: Sequence[CheckedRequest], request_id: str,
                       *, skip_special_tokens: bool) -> list[RequestOutput]:
    """Return the finished output of each prompt, with its likeliest answer first."""
    params = beam_params(body, requests[0].sampling.max_tokens or llm.engine.limits.max_len)
    tokenizer = llm.engine.model.need_tokenizer()
    async with llm.holding_adapter(requests[0]) as first:
        found = await _search(llm, params, [first, *requests[1:]], request_id)
    return [_output(request, beams, params, tokenizer, skip_special_tokens)
            for request, beams in zip(requests, found, strict=True)]


async def _search(llm: AsyncLLM, params: BeamSearchParams, requests: Sequence[CheckedRequest],
                  request_id: str) -> list[BeamSearchOutput]:
    first = requests[0]  # of one body, so all of them have its adapter, salt, priority and tenant
    rounds = beam_rounds([request.token_ids for request in requests], params, None, llm.engine.model.eos_ids,
                         llm.engine.limits)
    names = (f"{request_id}-{number}" for number in count())
    try:
        asked = next(rounds)
        while True:
            prompts = [{"prompt_token_ids": beam, "cache_salt": first.cache_salt} for beam in asked.token_ids]
            checked = await llm.check(prompts, asked.sampling, first.priority, tenant=first.tenant)
            async with asyncio.TaskGroup() as group:  # if one fails, the others are aborted
                tasks = [group.create_task(_followed(llm, replace(request, parts=first.parts), next(names)))
                         for request in checked]
            asked = rounds.send([task.result() for task in tasks])
    except StopIteration as end:
        return cast("list[BeamSearchOutput]", end.value)
    except ExceptionGroup as several:
        raise several.exceptions[0] from None


async def _followed(llm: AsyncLLM, request: CheckedRequest, request_id: str) -> RequestOutput:
    async with aclosing(llm.follow(request, request_id)) as outputs:
        async for output in outputs:
            last = output
    return cast(RequestOutput, last)


def _output(request: CheckedRequest, found: BeamSearchOutput, params: BeamSearchParams, tokenizer: Tokenizer,
            skip_special_tokens: bool) -> RequestOutput:
    output = cast(RequestOutput, empty_output("", request))
    output.outputs = []
    for index, beam in enumerate(found.sequences):
        token_ids = beam.tokens[len(request.token_ids) :]
        is_cut = beam.finish_reason == "stop" and not params.include_stop_str_in_output
        text = tokenizer.decode(token_ids[:-1] if is_cut else token_ids, skip_special_tokens)
        output.outputs.append(CompletionOutput(index, text, token_ids, beam.finish_reason))
    return output
