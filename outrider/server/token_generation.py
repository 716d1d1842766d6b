"""/inference/v1/generate: token ids in, token ids out, under vLLM's names. Trainers and gateways that tokenize on their
own use it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from pydantic import Field

from outrider.core.outputs import CompletionOutput, RequestOutput
from outrider.server.answer_json import write_answer
from outrider.server.bodies import beside_loop, validated
from outrider.server.chat import logprobs_to_json
from outrider.server.completions import prompt_logprobs_to_json
from outrider.server.errors import ApiError
from outrider.server.generation import Usage, answer_values
from outrider.server.protocol import CompletionRequest, Scheduled, TokenIds
from outrider.server.service import Service, name_request
from outrider.server.work import JsonWork, Work

DEFAULT_MAX_TOKENS = 16
WITHOUT_EFFECT = ("output_kind", "detokenize")  # an answer is whole and has no text
OF_THE_BODY = ("prompt", "prompt_embeds", "model", "stream", "priority", "cache_salt", "request_id", "timeout", "echo")


class GenerateRequest(Scheduled):
    request_id: str | None = None
    model: str | None = None
    token_ids: TokenIds = Field(description="the prompt")
    sampling_params: dict[str, Any] = Field(default={}, description="fields of /v1/completions that say how tokens are "
                                                                    "drawn and reported")
    stream: bool | None = Field(default=None, description="only false is served")

    def as_completion(self) -> CompletionRequest:
        """Make the request to /v1/completions that asks for the same, so that its checks hold here too."""
        given = {name: value for name, value in self.sampling_params.items() if name not in WITHOUT_EFFECT}
        for name in OF_THE_BODY:
            if given.get(name) is not None:
                raise ApiError(400, f"{name} is not a sampling parameter: leave it out of sampling_params",
                               param="sampling_params")
        own = {name: getattr(self, name) for name in ("model", "priority", "cache_salt", "request_id", "timeout")}
        return validated(CompletionRequest, given | own | {"prompt": self.token_ids})


async def generate_tokens(service: Service, body: GenerateRequest, tenant: str | None) -> Work:
    if body.stream:
        raise ApiError(400, "stream must be false here: to stream token ids, use /v1/completions with return_token_ids",
                       param="stream")
    asked = service.with_defaults(await beside_loop(partial(body.as_completion)))
    service.check_model(asked.model)
    service.check_load(tenant)
    prompts = await service.encode_prompts(asked.prompt or [], "token_ids", False, None)
    max_tokens = DEFAULT_MAX_TOKENS if asked.max_tokens is None else asked.max_tokens
    requests = await service.check_sampled(asked, prompts, tenant, logprobs=asked.logprobs, max_tokens=max_tokens)
    name, usage = name_request("generate", asked), Usage(requests)

    async def answer() -> list[bytes]:
        outputs = await service.whole(asked, requests, name.engine, usage, skip_special_tokens=False)
        num = answer_values(outputs, requests[0].sampling, service.host.llm.engine.limits.vocab_size,
                            repeats_prompt=asked.prompt_logprobs is not None)
        return await write_answer(lambda: _answer(name.answer, asked, outputs, usage), num)

    return JsonWork(answer(), service.deadline(asked))


def _answer(name: str, asked: CompletionRequest, outputs: Sequence[RequestOutput], usage: Usage) -> dict[str, Any]:
    (output,) = outputs
    prompt = None if output.prompt_logprobs is None else prompt_logprobs_to_json(output.prompt_logprobs)
    return {"request_id": name, "choices": [_choice(asked, sample) for sample in output.outputs],
            "prompt_logprobs": prompt, "kv_transfer_params": None, "usage": usage.to_json()}


def _choice(asked: CompletionRequest, sample: CompletionOutput) -> dict[str, Any]:
    logprobs = None
    if sample.logprobs is not None:
        logprobs = {"content": logprobs_to_json(sample.token_ids, sample.logprobs, asked.logprobs or 0, by_id=True)}
    return {"index": sample.index, "token_ids": sample.token_ids, "logprobs": logprobs,
            "finish_reason": sample.finish_reason, "stop_reason": sample.stop_reason,
            "weight_versions": sample.weight_versions} | dict(sample.extras)
