"""/invocations: the single route of SageMaker, for bodies of all kinds. The fields of a body tell which route it is
for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from outrider.server.bodies import validated
from outrider.server.chat import chat_completions
from outrider.server.completions import completions
from outrider.server.embeddings import EmbeddingRequest, PoolingRequest, create_embeddings, create_pooling
from outrider.server.errors import ApiError
from outrider.server.protocol import Body, ChatRequest, CompletionRequest
from outrider.server.scoring import PAIRS, RerankRequest, ScoreRequest, create_rerank, create_score
from outrider.server.service import Service
from outrider.server.work import Work


class BodyKind(NamedTuple):
    fields: tuple[str, ...]  # a body that has one of these is of this kind
    model: type[Body]
    serve: Callable[[Service, Any, str | None], Awaitable[Work]]


# The first kind that fits: queries have documents too, and what is pooled has an input too.
KINDS = (
    BodyKind(("messages",), ChatRequest, chat_completions),
    BodyKind(("prompt", "prompt_embeds"), CompletionRequest, completions),
    BodyKind(("query",), RerankRequest, create_rerank),
    BodyKind(tuple(dict.fromkeys(name for pair in PAIRS for name in pair)), ScoreRequest, create_score),
    BodyKind(("task",), PoolingRequest, create_pooling),
    BodyKind(("input",), EmbeddingRequest, create_embeddings),
)


def kind_of(body: dict[str, Any]) -> BodyKind:
    for kind in KINDS:
        if any(body.get(name) is not None for name in kind.fields):
            return kind
    names = ", ".join(dict.fromkeys(kind.fields[0] for kind in KINDS if kind.fields != ("task",)))
    raise ApiError(400, f"the body must have one of the fields {names}, which tell what is asked for")


def read_body(kind: BodyKind, body: dict[str, Any]) -> Body:
    return validated(kind.model, body)  # an error is that of the kind's own route
