"""A conversation with the model of a server: `outrider chat --url`. It works with any server that has OpenAI's API."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import fields
from typing import Any

from outrider.commands.conversation import Conversation
from outrider.commands.http_stream import Address, HttpError, model_names, stream_events
from outrider.commands.parser import ENGINE_FIELDS, UsageError, sampling_params
from outrider.commands.run_prompts import Interrupt, Interrupted, interruptible
from outrider.core.outputs import CompletionOutput, RequestMetrics, RequestOutput
from outrider.core.params import SamplingParams

# Fields of OpenAI's own API, which every server takes; others are sent only if they say something.
COMMON = ("temperature", "top_p", "max_tokens")
UNSENT = ("n", "detokenize", "bad_words_token_ids", "logprobs", "prompt_logprobs")
PATIENCE = 0.1  # seconds until Ctrl-C is looked for


class RemoteConversation(Conversation):
    def __init__(self, address: Address, model: str, body: dict[str, Any], system: str | None,
                 key: str | None) -> None:
        super().__init__(system)
        self._address, self._key = address, key
        self._body = body | {"model": model, "stream": True, "stream_options": {"include_usage": True}}

    def _ask(self, messages: list[dict[str, Any]], show: Callable[[str], None], priority: int) -> RequestOutput:
        body = self._body | {"messages": messages} | ({"priority": priority} if priority else {})
        output = RequestOutput("0", None, [], [CompletionOutput(0)])
        with interruptible() as interrupt:
            try:
                asyncio.run(self._stream(body, output, show, interrupt))
            except (HttpError, OSError, asyncio.IncompleteReadError) as error:
                raise RuntimeError(str(error) or type(error).__name__) from None
        return output

    async def _stream(self, body: dict[str, Any], output: RequestOutput, show: Callable[[str], None],
                      interrupt: Interrupt) -> None:
        sample = output.outputs[0]
        events = stream_events(self._address, "/v1/chat/completions", body, self._key)
        with suppress(Interrupted):
            async for event in _interruptible(events, interrupt):
                if "error" in event:
                    raise HttpError(str(event["error"].get("message", event["error"])))
                for choice in event.get("choices", []):
                    text = choice.get("delta", {}).get("content") or ""
                    sample.text += text
                    show(text)
                if event.get("usage"):
                    _read_usage(event, output)


async def _interruptible(events: AsyncGenerator[dict[str, Any], None],
                         interrupt: Interrupt) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the events until Ctrl-C. Then the connection is closed, which ends the request."""
    try:
        while True:
            next_event = asyncio.ensure_future(anext(events, None))
            while not next_event.done():
                await asyncio.wait({next_event}, timeout=PATIENCE)
                if interrupt.is_set:
                    next_event.cancel()
                    await asyncio.wait({next_event})
                    raise Interrupted
            event = next_event.result()
            if event is None:
                return
            yield event
    finally:
        await events.aclose()


def _read_usage(event: dict[str, Any], output: RequestOutput) -> None:
    """Read the counts for the line of statistics, as far as the server reports them."""
    usage = event["usage"]
    drafts = (event.get("metrics") or {}).get("speculative_decoding") or {}
    output.prompt_token_ids = [0] * usage.get("prompt_tokens", 0)
    output.outputs[0].token_ids = [0] * usage.get("completion_tokens", 0)
    output.metrics = RequestMetrics(
        num_cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
        num_steps=drafts.get("num_spec_steps", 0), num_draft_tokens=drafts.get("num_draft_tokens", 0),
        num_accepted_tokens=drafts.get("num_accepted_draft_tokens", 0), finished_time=time.perf_counter())


def connect(args: argparse.Namespace, default_model: str) -> RemoteConversation:
    """Ask the server for its model, so that an address that does not answer is reported at once."""
    given = [name for name in ENGINE_FIELDS if name != "model" and hasattr(args, name)]
    if args.chat_template is not None:
        raise UsageError("--chat-template is a setting of the server: give it to `outrider serve`, or leave out --url")
    if args.lora is not None:
        raise UsageError("--lora cannot be used with --url: give the adapter's name on the server as MODEL")
    if given:
        raise UsageError(f"--{given[0].replace('_', '-')} is a setting of the engine: leave it out with --url")
    address = Address.parse(args.url)
    try:
        names = asyncio.run(model_names(address, args.api_key))
        name = args.model if args.model != default_model else names[0]
    except (HttpError, OSError, ValueError, LookupError, asyncio.IncompleteReadError) as error:
        raise ValueError(f"no server answers at {args.url} ({error}): start one with `outrider serve`, or correct "
                         "--url") from None
    return RemoteConversation(address, name, request_body(sampling_params(args)), args.system, args.api_key)


def request_body(params: SamplingParams) -> dict[str, Any]:
    body = {name: getattr(params, name) for name in COMMON}
    for own in fields(SamplingParams):
        value = getattr(params, own.name)
        if own.name not in (*COMMON, *UNSENT) and value != own.default:
            body[own.name] = value
    return body
