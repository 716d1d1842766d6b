"""/v1/chat/completions: a conversation through the model's chat template, with n samples."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from outrider.core.checked_request import CheckedRequest
from outrider.core.outputs import CompletionOutput, Logprob, RequestOutput
from outrider.server.answer_json import write_answer
from outrider.server.bodies import beside_loop
from outrider.server.chat_prompts import ChatInput
from outrider.server.choice import ParsedChoice, plain_message
from outrider.server.completions import mixed_versions_to_json, prompt_logprobs_to_json
from outrider.server.errors import ApiError
from outrider.server.forms import ForcedCalls, chat_form, forced_calls, with_allowed_tools
from outrider.server.generation import (
    Change,
    ChangeReader,
    Usage,
    answer_values,
    extra_fields,
    finite,
    named,
    named_by_id,
    top_token_ids,
)
from outrider.server.images import forget_images
from outrider.server.parsers import output_parser
from outrider.server.protocol import ChatRequest
from outrider.server.service import Service, name_request
from outrider.server.templating import plain_text
from outrider.server.work import EventStream, JsonWork, Work, compact, event, quoted

PROMPT_END = 16  # tokens of the prompt in which a template may have opened a region


async def chat_completions(service: Service, body: ChatRequest, tenant: str | None) -> Work:
    body = service.with_defaults(body)
    model, requests, choices = await prepare_chat(service, body, tenant)
    run = _Chat(service, body, requests, model, choices)
    timeout = service.deadline(body)
    return EventStream(run.frames(), timeout) if body.stream else JsonWork(run.answer(), timeout)


async def prepare_chat(service: Service, body: ChatRequest,
                       tenant: str | None) -> tuple[str, list[CheckedRequest], list[ParsedChoice]]:
    """Return the model's name, the checked request, and, if the model's text needs parsing, a parser for each
    sample."""
    model = service.check_model(body.model)
    body = with_allowed_tools(body)
    _check(body, service.config.tool_call_parser)
    forced = await beside_loop(lambda: forced_calls(body, service.config.tool_call_parser))
    service.check_load(tenant)
    tools = None if body.tool_choice == "none" else body.tools
    conversation = ChatInput(body.messages, tools, body.template_variables, body.add_generation_prompt,
                                body.continue_final_message, body.reasoning_effort)
    prompt = await service.encode_chat(conversation, body.add_special_tokens,
                                       service.truncation(body, "left", _max_tokens(body) or 1), takes_images=True)
    more: dict[str, Any] = {"max_tokens": _max_tokens(body)}
    more["logprobs"] = (body.top_logprobs or 0) if body.logprobs else None
    prompt_end = service.tokenizer.decode(prompt[-PROMPT_END:], skip_special_tokens=False)
    more["structured_outputs"] = await beside_loop(lambda: chat_form(
        body, forced, service.config.reasoning_parser, prompt_end, service.tokenizer))
    choice = await beside_loop(lambda: _parsed_choice(service, body, forced, prompt_end))
    if choice is not None:
        more["skip_special_tokens"] = False  # markers often are special tokens
    try:
        async with service.images.decoded(body.messages, tenant) as images:
            requests = await service.check_sampled(body, [images.in_prompt(prompt)], tenant, **more)
    except ApiError as error:
        raise error.renamed(_own_names(body)) from None
    forget_images(body.messages)
    # Only now: until the engine agrees, `n` may be any number.
    others = await beside_loop(lambda: [_parsed_choice(service, body, forced, prompt_end)
                                        for _ in range(1, requests[0].num_samples)])
    return model, requests, [own for own in (choice, *others) if own is not None]


def _parsed_choice(service: Service, body: ChatRequest, forced: ForcedCalls | None,
                   prompt_end: str) -> ParsedChoice | None:
    """Make the parser for the text of one sample. Returns None if all of the text is content."""
    tools = (body.tools or []) if body.tool_choice != "none" else []
    tool_format = service.config.tool_call_parser if tools else None
    schemas = {tool.function.name: tool.function.parameters or {} for tool in tools}
    parser = output_parser(tool_format, service.config.reasoning_parser, schemas=schemas, prompt_end=prompt_end,
                           calls=() if forced is None else forced.regions)
    return None if parser is None else ParsedChoice(
        parser, includes_reasoning=body.include_reasoning is not False, tool_format=tool_format,
        is_named=forced is not None and forced.is_named)


def _check(body: ChatRequest, tool_format: str | None) -> None:
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
    if body.tools and body.tool_choice in (None, "auto") and tool_format is None:
        raise ApiError(400, "this server was started without --tool-call-parser and cannot read tool calls: leave out "
                            "tools, or set tool_choice to none", param="tools")
    if body.tool_choice == "auto" and not body.tools:
        raise ApiError(400, "tool_choice needs tools: give tools, or leave tool_choice out", param="tool_choice")


def _own_names(body: ChatRequest) -> dict[str, str]:
    """Map a parameter's name in the engine to the chat field that it came from, for error messages."""
    own = {"logprobs": "top_logprobs"}
    return own if body.max_completion_tokens is None else own | {"max_tokens": "max_completion_tokens"}


def _max_tokens(body: ChatRequest) -> int | None:
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise ApiError(400, "max_tokens and max_completion_tokens say the same thing: give one", param="max_tokens")
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


class _Chat:
    """One request to /v1/chat/completions: runs it in the engine and makes the answer, streamed or whole."""

    def __init__(self, service: Service, body: ChatRequest, requests: Sequence[CheckedRequest], model: str,
                 choices: Sequence[ParsedChoice]) -> None:
        self._service, self._body, self._requests, self._choices = service, body, requests, choices
        self._name = name_request("chatcmpl", body)
        self._model, self._created = model, int(time.time())
        self._usage = Usage(requests)
        last = body.messages[-1]
        self._echo = plain_text(last.content) if body.echo and last.role == "assistant" else ""

    async def answer(self) -> list[bytes]:
        skips = self._body.skip_special_tokens is not False and not self._choices
        (last,) = await self._service.whole(self._body, self._requests, self._name.engine, self._usage,
                                            skip_special_tokens=skips)
        repeats_prompt = self._body.prompt_logprobs is not None or bool(self._body.return_token_ids)
        vocab_size = self._service.host.llm.engine.limits.vocab_size
        num = answer_values([last], self._requests[0].sampling, vocab_size, repeats_prompt=repeats_prompt)
        return await write_answer(lambda: self._answer(last), num)

    def _answer(self, last: RequestOutput) -> dict[str, Any]:
        answer = self._head("chat.completion") | {
            "choices": [self._choice(sample) for sample in last.outputs], "usage": self._usage.to_json(),
            "metrics": self._usage.metrics_to_json(), "prompt_logprobs": None, "prompt_token_ids": None}
        if last.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs_to_json(last.prompt_logprobs)
            answer |= mixed_versions_to_json(last)
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = last.prompt_token_ids
        return answer

    async def frames(self) -> AsyncGenerator[bytes, None]:
        n = self._requests[0].num_samples
        reader = ChangeReader(keeps_runs=bool(self._body.return_run_lengths))
        head = compact(self._head("chat.completion.chunk"))[:-1]
        has_begun = False
        async with aclosing(self._service.run(self._requests, self._name.engine)) as parts:
            async for i, increments in parts:
                chunks = []
                if not has_begun:
                    has_begun = True
                    role = compact({"role": "assistant", "content": self._echo})
                    chunks = [self._frame(f"{head}{self._prompt_ids()}", 0, role)]
                    chunks += [self._frame(head, index, role) for index in range(1, n)]
                self._usage.update(i, increments)
                chunks += [chunk for change in reader.read(increments) for chunk in self._chunks(head, change)]
                if chunks:
                    yield "".join(chunks).encode()
        if self._body.wants_usage:
            yield event(self._head("chat.completion.chunk") | {
                "choices": [], "usage": self._usage.to_json(), "metrics": self._usage.metrics_to_json()})

    def _prompt_ids(self) -> str:
        """Return the field with the prompt's token ids for the first chunk, if the client asked for it."""
        ids = self._requests[0].token_ids
        return f',"prompt_token_ids":{compact(ids)}' if self._body.return_token_ids else ""

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._name.answer, "object": kind, "created": self._created, "model": self._model}

    def _chunks(self, head: str, change: Change) -> list[str]:
        delta = f'{{"content":{quoted(change.text)}}}' if change.text else "{}"
        finish = change.finish_reason
        chunks = []
        if self._choices:
            choice = self._choices[change.choice]
            deltas = choice.deltas(change.text, finish is not None)
            delta = compact(deltas.pop()) if deltas and finish is None else "{}"
            chunks = [self._frame(head, change.choice, compact(each)) for each in deltas]
            finish = choice.finish_reason(finish)
        more = ""
        if change.logprobs is not None:
            more = f',"logprobs":{compact(self._logprobs(change.token_ids, named(change.logprobs)))}'
        if change.finish_reason:
            more += f',"stop_reason":{compact(change.stop_reason)}'
        if self._body.return_token_ids:
            more += f',"token_ids":{compact(change.token_ids)}'
        more += extra_fields(change)
        if self._body.return_run_lengths:
            more += f',"run_lengths":{compact(change.run_lengths)}'
        if delta != "{}" or finish or more:
            chunks.append(self._frame(head, change.choice, delta, finish, more))
        return chunks

    def _frame(self, head: str, index: int, delta: str, finish: str | None = None, more: str = "") -> str:
        """Write a chunk of a stream. It is formatted by hand, because every step writes one for each stream."""
        usage = self._usage.field_of_chunk(self._body)
        reason = f'"{finish}"' if finish else "null"
        return (f'data: {head},"choices":[{{"index":{index},"delta":{delta},"finish_reason":{reason}{more}}}]'
                f"{usage}}}\n\n")

    def _choice(self, sample: CompletionOutput) -> dict[str, Any]:
        message = plain_message(sample.text)
        finish = sample.finish_reason
        if self._choices:
            message = self._choices[sample.index].message(sample.text)
            finish = self._choices[sample.index].finish_reason(finish)
        if self._echo:
            message["content"] = self._echo + (message["content"] or "")
        choice: dict[str, Any] = {"index": sample.index, "message": message, "logprobs": None, "finish_reason": finish,
                                  "stop_reason": sample.stop_reason, "token_ids": None}
        if sample.logprobs is not None:
            choice["logprobs"] = self._logprobs(sample.token_ids, sample.logprobs)
        if self._body.return_token_ids:
            choice["token_ids"] = sample.token_ids
        choice |= sample.extras
        return choice

    def _logprobs(self, token_ids: list[int], entries: list[dict[int, Logprob]]) -> dict[str, Any]:
        content = logprobs_to_json(token_ids, entries, self._body.top_logprobs or 0,
                                   by_id=bool(self._body.return_tokens_as_token_ids))
        return {"content": content, "refusal": None}


def logprobs_to_json(token_ids: Sequence[int], entries: Sequence[dict[int, Logprob]], most: int, *,
                     by_id: bool = False) -> list[dict[str, Any]]:
    """Write log-probabilities as JSON. most: the number of likeliest tokens that are listed beside each token."""
    content = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        top = [_logprob(other, entry, by_id) for other in top_token_ids(entry, most)]
        content.append(_logprob(token_id, entry, by_id) | {"top_logprobs": top})
    return content


def _logprob(token_id: int, entry: dict[int, Logprob], by_id: bool) -> dict[str, Any]:
    text = entry[token_id].decoded_token or ""
    return {"token": named_by_id(token_id) if by_id else text, "logprob": finite(entry[token_id].logprob),
            "bytes": list(text.encode())}
