"""/score and /rerank: the similarity of texts, by the angle between their embeddings.

Bodies and answers are vLLM's; those of /rerank are also Jina's and Cohere's. Each text is computed once, even if it is
in many pairs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from outrider.core.checked_request import CheckedRequest
from outrider.core.fields import shown
from outrider.pooling_params import PoolingParams
from outrider.server.errors import ApiError, bad_value
from outrider.server.pooled import PooledRequest, pooled_vectors, pooling_params, prompt_usage
from outrider.server.protocol import Prompts
from outrider.server.service import Service, name_request
from outrider.server.truncation import Truncation
from outrider.server.work import JsonWork, Work

# Names of the texts and of those that they are compared with, of which a body has one pair.
PAIRS = (("text_1", "text_2"), ("queries", "items"), ("queries", "documents"), ("data_1", "data_2"))
NEEDS_PAIR = "give the texts to compare as " + ", or as ".join(" and ".join(pair) for pair in PAIRS)


class ScoreRequest(PooledRequest):
    text_1: Prompts | None = Field(default=None, description="one text, or one for each of text_2")
    text_2: Prompts | None = None
    queries: Prompts | None = Field(default=None, description="one text, or one for each of items or documents")
    items: Prompts | None = None
    documents: Prompts | None = None
    data_1: Prompts | None = Field(default=None, description="one text, or one for each of data_2")
    data_2: Prompts | None = None


class RerankRequest(PooledRequest):
    query: str
    # Objects are looked at once their number is known to be small: to check a million of them takes seconds.
    documents: Annotated[list[str | dict[str, Any]], Field(fail_fast=True)] = Field(
        description="texts, or objects with a text each")
    top_n: int | None = Field(default=None, ge=0, description="so many of the best; default, and 0: all")
    return_documents: bool | None = Field(default=None, description="false: results have indices only")
    max_tokens_per_doc: int | None = Field(default=None, ge=1, description="the rest of a document is cut off")


async def create_score(service: Service, body: ScoreRequest, tenant: str | None) -> Work:
    names = _pair(body)
    model = service.check_model(body.model)
    service.check_load(tenant)
    truncation = service.truncation(body)
    ones, others = [await service.encode_prompts(getattr(body, name), name, truncation=truncation) for name in names]
    if len(ones) not in (1, len(others)):
        raise ApiError(400, f"{names[0]} has {len(ones)} texts and {names[1]} has {len(others)}: give one in "
                            f"{names[0]}, or as many as in {names[1]}", param=names[0])
    _check_number(service, len(ones) + len(others), names[1])
    if service.host.llm.engine.model.classes is not None:
        one, other = (_texts(getattr(body, name)) for name in names)
        pairs = await _pairs(service, body, one, other, tenant)
        return JsonWork(_score_answer(service, body, model, [], pairs), service.deadline(body))
    asked = await _checked(service, body, ones, names[0], tenant)
    found = await _checked(service, body, others, names[1], tenant)
    return JsonWork(_score_answer(service, body, model, asked, found), service.deadline(body))


async def _score_answer(service: Service, body: ScoreRequest, model: str, asked: Sequence[CheckedRequest],
                        found: Sequence[CheckedRequest]) -> dict[str, Any]:
    name = name_request("score", body)
    scores = await _scores(service, asked, found, name.engine)
    return {"id": name.answer, "object": "list", "created": int(time.time()), "model": model,
            "data": [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)],
            "usage": prompt_usage([*asked, *found])}


async def create_rerank(service: Service, body: RerankRequest, tenant: str | None) -> Work:
    model = service.check_model(body.model)
    service.check_load(tenant)
    _check_number(service, 1 + len(body.documents), "documents")
    texts = [_text(each) for each in body.documents]
    truncation = service.truncation(body)
    query = await service.encode_prompts(body.query, "query", truncation=truncation)
    most = body.max_tokens_per_doc
    if most is not None and (truncation is None or most < truncation.num_tokens):
        truncation = Truncation(most, "right")
    documents = await service.encode_prompts(texts, "documents", truncation=truncation)
    if service.host.llm.engine.model.classes is not None:
        asked, found = [], await _pairs(service, body, [body.query], texts, tenant)
    else:
        asked = await _checked(service, body, query, "query", tenant)
        found = await _checked(service, body, documents, "documents", tenant)

    async def answer() -> dict[str, Any]:
        name = name_request("rerank", body)
        scores = await _scores(service, asked, found, name.engine)
        best = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n or None]
        results: list[dict[str, Any]] = [{"index": i, "relevance_score": scores[i]} for i in best]
        if body.return_documents is not False:
            results = [result | {"document": {"text": texts[result["index"]]}} for result in results]
        return {"id": name.answer, "model": model, "results": results, "usage": prompt_usage([*asked, *found])}

    return JsonWork(answer(), service.deadline(body))


def _pair(body: ScoreRequest) -> tuple[str, str]:
    known = dict.fromkeys(name for pair in PAIRS for name in pair)
    given = tuple(name for name in known if getattr(body, name) is not None)
    for pair in PAIRS:
        if set(pair) == set(given):
            return pair
    raise ApiError(400, NEEDS_PAIR, param=given[0] if given else PAIRS[0][0])


def _text(document: str | dict[str, Any]) -> str:
    match document:
        case str():
            return document
        case {"text": str() as text} if len(document) == 1:
            return text
    raise ApiError(400, 'documents must be texts, or objects with one text each, such as {"text": "..."}; one has '
                        f"{', '.join(map(shown, document)) or 'nothing'}", param="documents")


def _check_number(service: Service, num_texts: int, param: str) -> None:
    if num_texts > service.config.max_prompts:
        raise ApiError(400, f"the body has {num_texts} texts, and one request may have at most "
                            f"{service.config.max_prompts}: send fewer", param=param)


async def _checked(service: Service, body: PooledRequest, prompts: Sequence[list[int]], param: str,
                   tenant: str | None) -> list[CheckedRequest]:
    try:
        return await service.check(body, prompts, pooling_params(service, body), tenant)
    except ApiError as error:
        if error.param is not None:
            raise
        raise ApiError(error.status, f"{param}: {error}", param=param) from None


def _texts(given: Any) -> list[Any]:
    return [given] if isinstance(given, str) else list(given)


async def _pairs(service: Service, body: PooledRequest, ones: list[Any], others: list[Any],
                 tenant: str | None) -> list[CheckedRequest]:
    """Make one request for each pair of texts, for a model that reads both texts in one prompt."""
    truncation = service.truncation(body)
    try:
        prompts = await asyncio.to_thread(service.host.llm.engine.checks.join_pairs, ones, others)
    except ValueError as error:
        raise bad_value(error, type(body).model_fields) from None
    cut = prompts if truncation is None else [truncation.cut(prompt) for prompt in prompts]
    return await service.check(body, cut, PoolingParams(task="classify"), tenant)


async def _scores(service: Service, ones: Sequence[CheckedRequest], others: Sequence[CheckedRequest],
                  request_id: str) -> list[float]:
    """Return the scores of all pairs of texts. If `ones` is empty, each request in `others` already contains a pair."""
    vectors = await pooled_vectors(service, [*ones, *others], request_id)
    if not ones:
        return [float(vector[0]) for vector in vectors]
    first, second = vectors[: len(ones)], vectors[len(ones) :]
    pairs = zip(first * len(second) if len(first) == 1 else first, second, strict=True)
    return [float(one @ other) for one, other in pairs]
