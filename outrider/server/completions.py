"""/v1/completions: one or several prompts, with n samples for each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, NamedTuple

from outrider.core.checked_request import CheckedRequest
from outrider.core.outputs import CompletionOutput, Logprob, RequestOutput
from outrider.server.answer_json import Written, write_answer
from outrider.server.embeds_file import read_embeds_file
from outrider.server.errors import ApiError
from outrider.server.generation import Change, ChangeReader, Usage, answer_values, extra_fields, finite, named
from outrider.server.protocol import CompletionRequest
from outrider.server.service import PromptInput, Service, name_request
from outrider.server.token_log import TokenLog
from outrider.server.work import EventStream, JsonWork, Work, compact, event, quoted

DEFAULT_MAX_TOKENS = 16
NEEDS_TOKENS = ("echo", "truncate_prompt_tokens", "truncation_side", "add_special_tokens")


async def completions(service: Service, body: CompletionRequest, tenant: str | None) -> Work:
    model, body = service.check_model(body.model), service.with_defaults(body)
    service.check_load(tenant)
    prompts = await _read_prompts(service, body)
    more: dict[str, Any] = {"logprobs": body.logprobs}
    if body.echo:
        if body.stream and body.logprobs is not None:
            raise ApiError(400, "echo with logprobs cannot be streamed: leave out stream, echo or "
                                "logprobs", param="echo")
        more["prompt_logprobs"] = body.prompt_logprobs if body.logprobs is None else body.logprobs
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if body.echo and max_tokens == 0:
        max_tokens = 1  # nothing but the prompt is wanted: the token after it is left out of the answer
    requests = await service.check_sampled(body, prompts, tenant, **more, max_tokens=max_tokens)
    run = _Completion(service, body, requests, model)
    timeout = service.deadline(body)
    return EventStream(run.frames(), timeout) if body.stream else JsonWork(run.answer(), timeout)


async def _read_prompts(service: Service, body: CompletionRequest) -> Sequence[PromptInput]:
    if (body.prompt is None) == (body.prompt_embeds is None):
        raise ApiError(400, "give either prompt or prompt_embeds, not both", param="prompt")
    if body.prompt_embeds is not None:
        for name in NEEDS_TOKENS:
            if getattr(body, name):
                raise ApiError(400, f"{name} needs the token ids of the prompt, and prompt_embeds have none: leave out "
                                    f"{name}, or give prompt", param=name)
        return await _read_embeds(service, body.prompt_embeds)
    assert body.prompt is not None
    truncation = service.truncation(body, "left", DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens)
    return await service.encode_prompts(body.prompt, "prompt", body.add_special_tokens is not False, truncation)


async def _read_embeds(service: Service, given: str | list[str]) -> list[PromptInput]:
    """Read the field prompt_embeds of a body: one file with embeddings, or a list of them."""
    files, most = [given] if isinstance(given, str) else given, service.config.max_prompts
    if not 1 <= len(files) <= most:
        raise ApiError(400, f"prompt_embeds has {len(files)} prompts, and one request may have from 1 to "
                            f"{most}: send fewer", param="prompt_embeds")
    limits = service.host.llm.engine.limits

    def work() -> list[PromptInput]:
        return [read_embeds_file(file, limits.max_len, limits.hidden_size) for file in files]

    return await asyncio.to_thread(work)


class _PromptParts(NamedTuple):
    """The JSON parts of an answer that repeat the prompt, such as its tokens and log-probabilities. They are written
    once and used in all choices of the prompt."""

    text: str  # empty unless the answer begins with it
    token_ids: Written | None
    logprobs: Written | None
    log: dict[str, Written] | None  # log-probabilities of the tokens of `text`, as TokenLog has them


class _Completion:
    """One request to /v1/completions: runs its prompts in the engine and makes the answer, streamed or whole."""

    def __init__(self, service: Service, body: CompletionRequest, requests: Sequence[CheckedRequest],
                 model: str) -> None:
        self._service, self._body, self._requests = service, body, requests
        name = name_request("cmpl", body)
        self._id = name.engine
        self._head = {"id": name.answer, "object": "text_completion", "created": int(time.time()), "model": model}
        self._usage = Usage(requests)
        # Token ids of the prompt of each choice, until a stream has given them.
        self._prompt_ids = {i * request.num_samples + k: request.token_ids for i, request in enumerate(requests)
                            for k in range(request.num_samples)
                            } if body.return_token_ids and body.prompt is not None else {}

    async def answer(self) -> list[bytes]:
        outputs = await self._service.whole(self._body, self._requests, self._id, self._usage,
                                            skip_special_tokens=self._body.skip_special_tokens is not False)
        if self._body.max_tokens == 0:
            self._usage.leave_out_completions()
        vocab_size = self._service.host.llm.engine.limits.vocab_size
        num = answer_values(outputs, self._requests[0].sampling, vocab_size, repeats_prompt=self._repeats_prompt)
        return await write_answer(lambda: self._answer(outputs), num)

    def _answer(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        choices = []
        for i, output in enumerate(outputs):
            prompt, versions = self._prompt_parts(output), mixed_versions_to_json(output)
            choices += [self._choice(prompt, sample, i * len(output.outputs) + sample.index) | versions
                        for sample in output.outputs]
        return self._head | {"choices": choices, "usage": self._usage.to_json(),
                             "metrics": self._usage.metrics_to_json()}

    @property
    def _repeats_prompt(self) -> bool:
        """Whether each choice contains its prompt's tokens as text, ids or log-probabilities."""
        return bool(self._body.echo or self._body.return_token_ids or self._body.prompt_logprobs is not None)

    async def frames(self) -> AsyncGenerator[bytes, None]:
        n = self._requests[0].num_samples
        has_text = self._service.host.llm.engine.model.tokenizer is not None
        readers = [ChangeReader(i * n, has_text=has_text, keeps_runs=bool(self._body.return_run_lengths))
                   for i in range(len(self._requests))]
        num_logs = 0 if self._body.logprobs is None else n * len(self._requests)
        logs = [self._token_log() for _ in range(num_logs)]  # by choice
        echoes = {}  # by choice, until it is given
        if self._body.echo:
            texts = await asyncio.to_thread(lambda: [self._prompt_text(list(request.token_ids))
                                                     for request in self._requests])
            echoes = {i * n + k: text for i, text in enumerate(texts) for k in range(n)}
        head = compact(self._head)[:-1]
        async with aclosing(self._service.run(self._requests, self._id)) as parts:
            async for i, increments in parts:
                self._usage.update(i, increments)
                if self._body.max_tokens == 0:
                    self._usage.leave_out_completions()
                changes = readers[i].read(increments)
                if echoes:
                    changes = [self._echoed(change, echoes.pop(change.choice, "")) for change in changes]
                chunks = [self._chunk(head, change, logs) for change in changes]
                if chunks:
                    yield "".join(chunks).encode()
        if self._body.wants_usage:
            yield event(self._head | {"choices": [], "usage": self._usage.to_json(),
                                      "metrics": self._usage.metrics_to_json()})

    def _echoed(self, change: Change, prompt: str) -> Change:
        if self._body.max_tokens != 0:
            return change._replace(text=prompt + change.text)
        return change._replace(text=prompt, token_ids=[], run_lengths=[], finish_reason="length", stop_reason=None)

    def _prompt_text(self, token_ids: list[int]) -> str:
        return self._service.tokenizer.decode(token_ids, skip_special_tokens=False)

    def _chunk(self, head: str, change: Change, logs: list[TokenLog]) -> str:
        """Write a chunk of a stream. It is formatted by hand, because every step writes one for each stream."""
        logprobs = "null"
        if change.logprobs is not None:
            log = logs[change.choice]
            log.add(change.token_ids, named(change.logprobs))
            logprobs = compact(log.take(len(change.text), is_last=change.finish_reason is not None))
        ids = f',"token_ids":{compact(change.token_ids)}' if self._body.return_token_ids else ""
        if change.choice in self._prompt_ids:
            ids += f',"prompt_token_ids":{compact(self._prompt_ids.pop(change.choice))}'
        ids += extra_fields(change)
        if self._body.return_run_lengths:
            ids += f',"run_lengths":{compact(change.run_lengths)}'
        usage = self._usage.field_of_chunk(self._body)
        reason, stop = "null", ""
        if change.finish_reason:
            reason, stop = f'"{change.finish_reason}"', f',"stop_reason":{compact(change.stop_reason)}'
        return (f'data: {head},"choices":[{{"index":{change.choice},"text":{quoted(change.text)},'
                f'"logprobs":{logprobs},"finish_reason":{reason}{stop}{ids}}}]{usage}}}\n\n')

    def _prompt_parts(self, output: RequestOutput) -> _PromptParts:
        """Write those parts of an answer that repeat the prompt. All choices of the prompt contain them."""
        text, ids, logprobs, before = "", None, None, None
        if self._body.echo:
            text = self._prompt_text(output.prompt_token_ids)
            if output.prompt_logprobs is not None and self._body.logprobs is not None:
                log = self._token_log(skip_special_tokens=False)
                log.add(output.prompt_token_ids, output.prompt_logprobs)
                taken = log.take(len(text), is_last=True)
                before = {name: Written.from_value(own) for name, own in taken.items()}
        if output.prompt_logprobs is not None and self._body.prompt_logprobs is not None:
            logprobs = Written.from_value(prompt_logprobs_to_json(output.prompt_logprobs))
        if self._body.return_token_ids and self._body.prompt is not None:
            ids = Written.from_value(list(output.prompt_token_ids))
        return _PromptParts(text, ids, logprobs, before)

    def _choice(self, prompt: _PromptParts, sample: CompletionOutput, index: int) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "text": sample.text, "logprobs": None,
                                  "finish_reason": sample.finish_reason, "stop_reason": sample.stop_reason,
                                  "prompt_logprobs": prompt.logprobs, "token_ids": None, "prompt_token_ids": None}
        if self._body.max_tokens == 0:
            sample = replace(sample, text="", token_ids=[], logprobs=None if sample.logprobs is None else [])
            choice |= {"text": "", "finish_reason": "length", "stop_reason": None}
        if self._body.echo:
            choice["text"] = prompt.text + sample.text
        if sample.logprobs is not None:
            log = self._token_log(len(prompt.text))
            log.add(sample.token_ids, sample.logprobs)
            own = log.take(len(sample.text), is_last=True)
            choice["logprobs"] = own if prompt.log is None else {
                name: prompt.log[name].extended(values) for name, values in own.items()}
        if self._body.return_token_ids:
            choice |= {"token_ids": sample.token_ids, "prompt_token_ids": prompt.token_ids}
        return choice | dict(sample.extras)

    def _token_log(self, begin: int = 0, skip_special_tokens: bool | None = None) -> TokenLog:
        if skip_special_tokens is None:
            skip_special_tokens = self._body.skip_special_tokens is not False
        tokenizer = self._service.host.llm.engine.model.tokenizer
        return TokenLog(tokenizer, skip_special_tokens, self._body.logprobs or 0, begin,
                        by_id=bool(self._body.return_tokens_as_token_ids))


def mixed_versions_to_json(output: RequestOutput) -> dict[str, Any]:
    """Return the field that tells which version of the weights computed which of the prompt's log-probabilities. It
    exists only if the weights were updated in between."""
    versions = output.prompt_weight_versions
    return {"prompt_weight_versions": versions} if len(versions) > 1 else {}


def prompt_logprobs_to_json(entries: list[dict[int, Logprob] | None]) -> list[dict[str, Any] | None]:
    return [None if entry is None else {
        str(token_id): {"logprob": finite(value.logprob), "rank": value.rank, "decoded_token": value.decoded_token}
        for token_id, value in entry.items()} for entry in entries]
