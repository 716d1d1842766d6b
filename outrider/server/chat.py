"""/v1/chat/completions: a conversation through the model's chat template, with n samples."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from outrider.core.outputs import CompletionOutput, Logprob, RequestOutput
from outrider.server.completions import prompt_logprobs_to_json
from outrider.server.errors import ApiError
from outrider.server.generation import Ask, Change, ChangeReader, Usage, finite, top_logprobs
from outrider.server.protocol import ChatRequest
from outrider.server.service import Service, new_id
from outrider.server.work import EventStream, JsonWork, Work, compact, event


async def chat_completions(service: Service, body: ChatRequest, tenant: str | None) -> Work:
    model = service.check_model(body.model)
    _check(body)
    service.check_load()
    prompt = await service.encode_chat(body.messages, body.tools, body.chat_template_kwargs, body.add_generation_prompt)
    asks = service.asks(body, [prompt], tenant, max_tokens=_max_tokens(body),
                        logprobs=(body.top_logprobs or 0) if body.logprobs else None)
    run = _Chat(service, body, asks, model)
    timeout = service.config.request_timeout
    return EventStream(run.frames(), timeout) if body.stream else JsonWork(run.answer(), timeout)


def _check(body: ChatRequest) -> None:
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
    if body.tools:
        raise ApiError(400, "tools are not supported by this server", param="tools")
    if body.tool_choice not in (None, "none", "auto"):
        raise ApiError(400, "tool_choice must be none or auto", param="tool_choice")


def _max_tokens(body: ChatRequest) -> int | None:
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise ApiError(400, "max_tokens and max_completion_tokens say the same thing: give one", param="max_tokens")
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


class _Chat:
    """One request to the route, from its checked ask to its answer."""

    def __init__(self, service: Service, body: ChatRequest, asks: Sequence[Ask], model: str) -> None:
        self._service, self._body, self._asks = service, body, asks
        self._id = new_id("chatcmpl")
        self._model, self._created = model, int(time.time())
        self._usage = Usage(asks)

    async def answer(self) -> dict[str, Any]:
        last: RequestOutput | None = None
        async with aclosing(self._service.run(self._asks, self._id)) as outputs:
            async for i, output in outputs:
                last = output
                self._usage.update(i, output)
        assert last is not None
        answer = self._head("chat.completion") | {
            "choices": [self._choice(sample) for sample in last.outputs], "usage": self._usage.to_json(),
            "metrics": self._usage.metrics_to_json()}
        if last.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs_to_json(last.prompt_logprobs)
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = last.prompt_token_ids
        return answer

    async def frames(self) -> AsyncGenerator[bytes, None]:
        n = self._asks[0].params.n
        reader = ChangeReader(n)
        head = compact(self._head("chat.completion.chunk"))[:-1]
        has_begun = False
        async with aclosing(self._service.run(self._asks, self._id)) as outputs:
            async for i, output in outputs:
                self._usage.update(i, output)
                chunks = [self._chunk(head, change) for change in reader.read(output)]
                if not has_begun:
                    has_begun = True
                    role = compact({"role": "assistant", "content": ""})
                    chunks[:0] = [self._frame(head, index, role) for index in range(n)]
                if chunks:
                    yield "".join(chunks).encode()
        if self._body.wants_usage:
            yield event(self._head("chat.completion.chunk") | {
                "choices": [], "usage": self._usage.to_json(), "metrics": self._usage.metrics_to_json()})

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _chunk(self, head: str, change: Change) -> str:
        delta = f'{{"content":{compact(change.text)}}}' if change.text else "{}"
        more = ""
        if change.logprobs is not None:
            more = f',"logprobs":{compact(self._logprobs(change.token_ids, change.logprobs))}'
        if change.finish_reason:
            more += f',"stop_reason":{compact(change.stop_reason)}'
        if self._body.return_token_ids:
            more += f',"token_ids":{compact(change.token_ids)}'
        return self._frame(head, change.choice, delta, change.finish_reason, more)

    def _frame(self, head: str, index: int, delta: str, finish: str | None = None, more: str = "") -> str:
        """Put together by hand: there is one for every run of every stream."""
        usage = f',"usage":{compact(self._usage.to_json())}' if self._body.wants_usage_always else ""
        return (f'data: {head},"choices":[{{"index":{index},"delta":{delta},"finish_reason":{compact(finish)}{more}}}]'
                f"{usage}}}\n\n")

    def _choice(self, sample: CompletionOutput) -> dict[str, Any]:
        message = {"role": "assistant", "content": sample.text, "refusal": None}
        choice: dict[str, Any] = {"index": sample.index, "message": message, "logprobs": None,
                                  "finish_reason": sample.finish_reason, "stop_reason": sample.stop_reason}
        if sample.logprobs is not None:
            choice["logprobs"] = self._logprobs(sample.token_ids, sample.logprobs)
        if self._body.return_token_ids:
            choice["token_ids"] = sample.token_ids
        return choice

    def _logprobs(self, token_ids: list[int], entries: list[dict[int, Logprob]]) -> dict[str, Any]:
        most = self._body.top_logprobs or 0
        return {"content": [_logprob(entry[token_id]) | {"top_logprobs": [_logprob(t) for t in
                                                                         top_logprobs(entry, most)]}
                            for token_id, entry in zip(token_ids, entries, strict=True)], "refusal": None}


def _logprob(value: Logprob) -> dict[str, Any]:
    token = value.decoded_token or ""
    return {"token": token, "logprob": finite(value.logprob), "bytes": list(token.encode())}
