"""The routes that generate no text: embeddings, classification, scoring."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from outrider.server.bodies import BodyRoute
from outrider.server.classification import ClassifyRequest, create_classes
from outrider.server.embeddings import EmbeddingRequest, PoolingRequest, create_embeddings, create_pooling
from outrider.server.guard import TENANT
from outrider.server.scoring import RerankRequest, ScoreRequest, create_rerank, create_score
from outrider.server.service import Service
from outrider.server.token_scoring import ScoreTokensRequest, score_tokens


def pooled_routes(service: Service) -> APIRouter:
    routes = APIRouter(route_class=BodyRoute)

    @routes.post("/v1/embeddings")
    async def create_embedding(body: EmbeddingRequest, request: Request) -> Response:
        return await create_embeddings(service, body, request.scope[TENANT])

    @routes.post("/pooling")
    async def pooling(body: PoolingRequest, request: Request) -> Response:
        return await create_pooling(service, body, request.scope[TENANT])

    @routes.post("/classify")
    async def classify(body: ClassifyRequest, request: Request) -> Response:
        return await create_classes(service, body, request.scope[TENANT])

    @routes.post("/score")
    @routes.post("/v1/score")
    async def score(body: ScoreRequest, request: Request) -> Response:
        return await create_score(service, body, request.scope[TENANT])

    @routes.post("/v1/score_tokens")
    async def create_token_scores(body: ScoreTokensRequest, request: Request) -> Response:
        return await score_tokens(service, body, request.scope[TENANT])

    @routes.post("/rerank")
    @routes.post("/v1/rerank")
    @routes.post("/v2/rerank")
    async def rerank(body: RerankRequest, request: Request) -> Response:
        return await create_rerank(service, body, request.scope[TENANT])

    return routes
