"""/v1/embeddings: hidden states of prompts, pooled to one vector each."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from outrider.core.checked_request import CheckedRequest
from outrider.core.pooling import PoolingRequestOutput
from outrider.core.pooling_params import PoolingParams
from outrider.server.errors import ApiError, bad_value
from outrider.server.protocol import Prompts, Scheduled
from outrider.server.service import Service, new_id
from outrider.server.work import JsonWork, Work

if TYPE_CHECKING:
    from outrider.core.pooling import Vectors


class EmbeddingRequest(Scheduled):
    input: Prompts
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    pooling: Literal["last", "mean"] | None = Field(default=None, description="None: as the server's --pooling says")
    normalize: bool | None = None


async def create_embeddings(service: Service, body: EmbeddingRequest, tenant: str | None) -> Work:
    model = service.check_model(body.model)
    service.check_load()
    prompts = await service.encode_prompts(body.input, "input")
    try:
        params = PoolingParams(pooling=body.pooling or service.config.pooling, normalize=body.normalize is not False,
                               dimensions=body.dimensions)
    except ValueError as error:
        raise bad_value(error, EmbeddingRequest.model_fields) from None
    requests = await service.check(body, prompts, params, tenant)
    return JsonWork(_answer(service, body, requests, model), service.deadline(body))


async def _answer(service: Service, body: EmbeddingRequest, requests: Sequence[CheckedRequest],
                  model: str) -> dict[str, Any]:
    request_id = new_id("embd")
    with service.admission.admit(len(requests), service.host.llm.engine.limits.max_requests):
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(_embedding(service, request, f"{request_id}-{i}"))
                         for i, request in enumerate(requests)]
        except ExceptionGroup as several:
            raise several.exceptions[0] from None
    write = _base64 if body.encoding_format == "base64" else _floats
    data = [{"object": "embedding", "index": i, "embedding": write(task.result())} for i, task in enumerate(tasks)]
    num_tokens = sum(len(request.token_ids) for request in requests)
    return {"id": request_id, "object": "list", "model": model, "data": data,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "completion_tokens": 0}}


async def _embedding(service: Service, request: CheckedRequest, request_id: str) -> Vectors:
    async with aclosing(service.host.llm.follow(request, request_id)) as outputs:
        async for output in outputs:
            if isinstance(output, PoolingRequestOutput) and output.outputs.data is not None:
                return output.outputs.data
    raise ApiError(503, "the engine ended the request; try again", retry_after=1)


def _floats(vector: Vectors) -> list[float]:
    return vector.tolist()


def _base64(vector: Vectors) -> str:
    """Little-endian float32, as OpenAI's client asks for unless it is told otherwise."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
