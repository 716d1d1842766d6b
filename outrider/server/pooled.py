"""Shared code of the routes that return hidden states or scores: embeddings, scores and /pooling.

A thread writes vectors as text, row by row. The JSON encoder lets no other thread run until it is done, and the answer
to a few hundred texts would hold up every stream for half a second.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from outrider.core.checked_request import CheckedRequest
from outrider.pooling_outputs import PoolingRequestOutput
from outrider.pooling_params import PoolingParams
from outrider.server.errors import ApiError, bad_value
from outrider.server.protocol import Prompted
from outrider.server.service import Service
from outrider.server.work import compact

if TYPE_CHECKING:
    from outrider.pooling_outputs import Vectors

Encoding = Literal["float", "base64"]


class PooledRequest(Prompted):
    """The fields that all requests for hidden states share."""

    model: str | None = None
    pooling: Literal["last", "mean"] | None = Field(default=None, description="None: as the server's --pooling says")


def pooling_params(service: Service, body: PooledRequest, **more: Any) -> PoolingParams:
    try:
        return PoolingParams(**{"pooling": body.pooling or service.config.pooling} | more)
    except ValueError as error:
        raise bad_value(error, type(body).model_fields) from None


async def pooled_vectors(service: Service, requests: Sequence[CheckedRequest], request_id: str) -> list[Vectors]:
    """Compute the pooled hidden states of each request. If one request fails, the others are aborted."""
    with service.admission.admit(len(requests), service.host.llm.engine.limits.max_requests, requests[0].tenant):
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(_pooled(service, request, f"{request_id}-{i}"))
                         for i, request in enumerate(requests)]
        except ExceptionGroup as several:
            raise several.exceptions[0] from None
    return [task.result() for task in tasks]


async def _pooled(service: Service, request: CheckedRequest, request_id: str) -> Vectors:
    async with aclosing(service.host.llm.follow(request, request_id)) as outputs:
        async for output in outputs:
            if isinstance(output, PoolingRequestOutput) and output.outputs.data is not None:
                return output.outputs.data
    raise ApiError(503, "the engine ended the request without a result: send it again", retry_after=1)


def prompt_usage(requests: Sequence[CheckedRequest]) -> dict[str, int]:
    num_tokens = sum(len(request.token_ids) for request in requests)
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "completion_tokens": 0}


async def write_vectors(answer: dict[str, Any], kind: str, name: str, vectors: Sequence[Vectors],
                        encoding: Encoding | None) -> list[bytes]:
    """Write `answer` as JSON, in parts. Its field `data` is a list with one object, of the type `kind`, for each vector
    or matrix."""
    def write() -> list[bytes]:
        parts = [compact(answer)[:-1].encode(), b',"data":[']
        for i, vector in enumerate(vectors):
            head = compact({"object": kind, "index": i})[:-1]
            parts += [f'{"," if i else ""}{head},"{name}":'.encode(), *_texts(vector, encoding), b"}"]
        return [*parts, b"]}"]

    return await asyncio.to_thread(write)


def _texts(vector: Vectors, encoding: Encoding | None) -> list[bytes]:
    if encoding == "base64":  # little-endian float32, as OpenAI's client asks for unless it is told otherwise
        return [b'"', base64.b64encode(vector.astype("<f4").tobytes()), b'"']
    if vector.ndim == 1:
        return [compact(vector.tolist()).encode()]
    rows = [compact(row.tolist()).encode() for row in vector]
    return [b"[", *(b"," + row if i else row for i, row in enumerate(rows)), b"]"]
