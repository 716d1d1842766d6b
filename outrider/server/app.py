"""Builds the HTTP application: its routes, and errors in OpenAI's form. Servers and tests need only `build_app`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import cache, partial
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.middleware.cors import CORSMiddleware

from outrider import __version__
from outrider.server import admin
from outrider.server.bodies import READERS, BodyRoute, beside_loop
from outrider.server.chat import chat_completions
from outrider.server.completions import completions
from outrider.server.engine_host import Serving
from outrider.server.error_answers import answer_errors
from outrider.server.errors import ApiError
from outrider.server.fair_threads import FairThreads
from outrider.server.guard import EXPOSED_HEADERS, TENANT, Guard, RootPath, guard_options
from outrider.server.ignored_fields import IgnoredFieldsHeader
from outrider.server.invocations import kind_of, read_body
from outrider.server.messages import MessagesPrompt, MessagesRequest, count_tokens, create_message
from outrider.server.page.dashboard import dashboard
from outrider.server.pooled_routes import pooled_routes
from outrider.server.protocol import ChatRequest, CompletionRequest
from outrider.server.reference_page import reference_page
from outrider.server.responses import response_routes
from outrider.server.service import Service
from outrider.server.text_routes import text_routes
from outrider.server.token_generation import GenerateRequest, generate_tokens


def build_app(service: Service, secret: bytes | None = None) -> FastAPI:
    """Build the application. A task that lives as long as the application loads, watches and restarts the engine.
    secret: see `Guard`."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        asyncio.get_running_loop().set_default_executor(FairThreads())
        readers = FairThreads(1)
        setattr(app.state, READERS, readers)
        task = asyncio.create_task(service.host.run())
        try:
            yield
        finally:
            task.cancel()
            readers.shutdown(wait=False)

    config = service.config
    app = FastAPI(title="Outrider", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None,
                  servers=[{"url": config.root_path}] if config.root_path else None)
    app.include_router(_openai_routes(service))
    app.include_router(response_routes(service))
    app.include_router(pooled_routes(service))
    app.include_router(_invocation_route(service))
    app.include_router(text_routes(service))
    app.include_router(_state_routes(service))
    app.add_api_route("/docs", _reference_route(app), include_in_schema=False)
    if config.admin:
        app.include_router(admin.admin_routes(service))
    answer_errors(app)
    app.add_middleware(IgnoredFieldsHeader, is_strict=config.strict)
    app.add_middleware(Guard, **guard_options(config), takes_images=lambda: service.takes_images,
                       on_refused=service.metrics.count_refused, secret=secret)
    if config.allowed_origins:  # outside the guard: a browser asks for permission without a key
        app.add_middleware(CORSMiddleware, allow_origins=list(config.allowed_origins), allow_methods=["*"],
                           allow_headers=["*"], expose_headers=EXPOSED_HEADERS)
    if config.root_path:
        app.add_middleware(RootPath, prefix=config.root_path)
    return app


def _openai_routes(service: Service) -> APIRouter:
    routes = APIRouter(route_class=BodyRoute)

    @routes.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [service.model_card(name) for name in service.all_names]}

    @routes.get("/v1/models/{name:path}")
    async def retrieve_model(name: str) -> dict[str, Any]:
        return service.model_card(service.check_model(name))

    @routes.post("/v1/completions")
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        return await completions(service, body, request.scope[TENANT])

    @routes.post("/v1/chat/completions")
    async def create_chat(body: ChatRequest, request: Request) -> Response:
        return await chat_completions(service, body, request.scope[TENANT])

    @routes.post("/inference/v1/generate")
    async def create_tokens(body: GenerateRequest, request: Request) -> Response:
        """Generate from token ids, and answer with token ids alone."""
        return await generate_tokens(service, body, request.scope[TENANT])

    @routes.post("/v1/messages")
    async def create_anthropic(body: MessagesRequest, request: Request) -> Response:
        return await create_message(service, body, request.scope[TENANT])

    @routes.post("/v1/messages/count_tokens")
    async def count_message_tokens(body: MessagesPrompt, request: Request) -> dict[str, int]:
        return {"input_tokens": await count_tokens(service, body, request.scope[TENANT])}

    return routes


def _invocation_route(service: Service) -> APIRouter:
    routes = APIRouter(route_class=BodyRoute)

    @routes.post("/invocations")
    async def invoke(body: dict[str, Any], request: Request) -> Response:
        """Answer a body for any of /v1/chat/completions, /v1/completions, /v1/embeddings, /pooling, /score and /rerank.
        Its fields tell which route is meant."""
        kind = kind_of(body)
        return await kind.serve(service, await beside_loop(partial(read_body, kind, body)), request.scope[TENANT])

    return routes


def _state_routes(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.get("/health")
    @routes.get("/ping")
    @routes.post("/ping", include_in_schema=False)
    @routes.head("/health", include_in_schema=False)
    @routes.head("/ping", include_in_schema=False)
    async def health() -> Response:
        """Answer 200, or 503 with the reason: loading, failed, or no step for too long. A sleeping engine is healthy,
        because nothing should restart it; the body then says why requests wait."""
        problem = service.host.problem
        if problem is not None:
            raise ApiError(503, problem, retry_after=5)
        pause = service.host.pause
        return JSONResponse({"status": "paused", "reason": pause}) if pause else Response()

    @routes.get("/ready")
    @routes.head("/ready", include_in_schema=False)
    async def ready() -> Response:
        """Answer 200 if the server would accept a request of at least one API key now: the engine is healthy and awake,
        and the queue has room."""
        await health()
        pause = service.host.pause
        if pause:
            raise ApiError(503, pause, retry_after=5)
        service.admission.check_room(service.host.llm.engine.limits.max_requests, len(service.config.api_key))
        return Response()

    page = dashboard()

    @routes.get("/", include_in_schema=False)
    async def index() -> Response:
        return page

    @routes.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @routes.get("/load")
    async def load() -> dict[str, int]:
        return {"server_load": service.admission.num_live}

    @routes.get("/metrics")
    async def metrics() -> Response:
        state = service.host.state
        engine = state.llm.engine if isinstance(state, Serving) else None
        text = service.metrics.text(engine, service.host.num_restarts)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    return routes


def _reference_route(app: FastAPI) -> Callable[[], Awaitable[Response]]:
    page = cache(lambda: reference_page(app.openapi()))  # on demand: a schema takes a moment

    async def docs() -> Response:
        return await asyncio.to_thread(page)

    return docs
