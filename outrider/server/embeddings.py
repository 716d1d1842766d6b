"""/v1/embeddings: returns one vector for each prompt. /pooling: returns one vector, or the hidden states of every
token."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from outrider.core.checked_request import CheckedRequest
from outrider.server.chat_prompts import ChatInput
from outrider.server.errors import ApiError
from outrider.server.pooled import Encoding, PooledRequest, pooled_vectors, pooling_params, prompt_usage, write_vectors
from outrider.server.protocol import ChatMessage, Prompts
from outrider.server.service import Service, name_request
from outrider.server.work import JsonWork, Work

CHAT_FIELDS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")
MAX_NUMBERS = 1 << 23  # in an answer with the states of every token: 32 MiB in the server, some 170 MB as JSON


class EmbeddingRequest(PooledRequest):
    input: Prompts | None = Field(default=None, description="one prompt or several; or give messages")
    messages: list[ChatMessage] | None = Field(default=None, min_length=1, description="one prompt, as a conversation "
                                                                                       "through the chat template")
    add_generation_prompt: bool | None = Field(default=None, description="of messages; default false")
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = Field(default=None, description="those that the tokenizer puts around a text; "
                                                                      "default true, and false for messages")
    chat_template_kwargs: dict[str, Any] | None = None
    encoding_format: Encoding | None = None
    dimensions: int | None = None
    normalize: bool | None = None


class PoolingRequest(EmbeddingRequest):
    task: Literal["embed", "token_embed", "classify", "token_classify"] | None = Field(
        default=None, description="embed: one vector for each prompt; token_embed: one for each token; classify and "
                                  "token_classify: probabilities of classes, where the model has them. Default "
                                  "classify for models with a head that classifies, embed for others")


async def create_embeddings(service: Service, body: EmbeddingRequest, tenant: str | None) -> Work:
    model, requests = await _prepared(service, body, tenant)
    return JsonWork(_answer(service, body, requests, model, "embedding"), service.deadline(body))


async def create_pooling(service: Service, body: PoolingRequest, tenant: str | None) -> Work:
    classes = service.host.llm.engine.model.classes
    task = body.task or ("embed" if classes is None or body.pooling is not None else "classify")
    if task != "embed" and body.pooling is not None:
        raise ApiError(400, f"pooling is not supported with the task {task}: leave it out, or use the task "
                            "embed", param="pooling")
    more = {} if task == "embed" else {"task": task, "pooling": "last"}
    model, requests = await _prepared(service, body, tenant, **more)
    if task.startswith("token_"):
        width = body.dimensions or service.host.llm.engine.limits.hidden_size
        if task == "token_classify" and classes is not None:
            width = classes.num_labels
        num_tokens = sum(len(request.token_ids) for request in requests)
        if num_tokens * width > MAX_NUMBERS:
            raise ApiError(400, f"input has {num_tokens} tokens with {width} numbers each, and an answer has at most "
                                f"{MAX_NUMBERS} numbers: send fewer tokens, or ask for fewer dimensions",
                           param="input")
    return JsonWork(_answer(service, body, requests, model, "pooling"), service.deadline(body))


async def _prepared(service: Service, body: EmbeddingRequest, tenant: str | None,
                    **more: str) -> tuple[str, list[CheckedRequest]]:
    model = service.check_model(body.model)
    service.check_load(tenant)
    prompts = await _encoded(service, body)
    params = pooling_params(service, body, normalize=body.normalize is not False, dimensions=body.dimensions, **more)
    return model, await service.check(body, prompts, params, tenant)


async def _encoded(service: Service, body: EmbeddingRequest) -> list[list[int]]:
    truncation = service.truncation(body)
    if body.input is not None and body.messages is None:
        for name in CHAT_FIELDS:
            if getattr(body, name) is not None:
                raise ApiError(400, f"{name} needs messages: give messages, or leave {name} out", param=name)
        return await service.encode_prompts(body.input, "input", body.add_special_tokens is not False, truncation)
    if body.messages is None or body.input is not None:
        raise ApiError(400, "give either input or messages, not both", param="input")
    chat = ChatInput(body.messages, None, body.chat_template_kwargs, body.add_generation_prompt is True,
                        body.continue_final_message)
    return [await service.encode_chat(chat, body.add_special_tokens, truncation)]


async def _answer(service: Service, body: EmbeddingRequest, requests: Sequence[CheckedRequest], model: str,
                  kind: Literal["embedding", "pooling"]) -> list[bytes]:
    names = name_request("embd" if kind == "embedding" else "pool", body)
    vectors = await pooled_vectors(service, requests, names.engine)
    head = {"id": names.answer, "object": "list", "created": int(time.time()), "model": model,
            "usage": prompt_usage(requests)}
    return await write_vectors(head, kind, "embedding" if kind == "embedding" else "data", vectors,
                               body.encoding_format)
