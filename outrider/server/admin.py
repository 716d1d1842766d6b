"""Routes of the server's operator, under vLLM's names: sleep, wake up, empty the prefix cache. They need --admin.

These routes change the server for all clients. Their requests have no body, so a browser would send them for any web
page without a CORS preflight. Therefore web pages may call them only from an allowed origin. The guard has already
checked the host name."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import PlainTextResponse
from pydantic import Field

from outrider.core.fields import shown
from outrider.server.body_errors import check_query, truth
from outrider.server.errors import ApiError
from outrider.server.protocol import Body
from outrider.server.service import Service
from outrider.server.trainer_routes import TRAINER_PATHS, trainer_routes
from outrider.server.work import carried_out

LOAD_ADAPTER, UNLOAD_ADAPTER = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
PATHS = ("/sleep", "/wake_up", "/is_sleeping", "/reset_prefix_cache", LOAD_ADAPTER, UNLOAD_ADAPTER, *TRAINER_PATHS)
NEEDS_FLAG = "it changes the server for all clients, and is there on a server that was started with --admin"


class UnloadAdapterRequest(Body):
    lora_name: Annotated[str, Field(min_length=1, max_length=200, description="the adapter's name, as a model")]
    lora_int_id: int | None = Field(default=None, description="is read, and makes no difference")


class LoadAdapterRequest(UnloadAdapterRequest):
    lora_path: Annotated[str, Field(min_length=1, max_length=4096, description="a folder below --lora-root")]
    load_inplace: bool = Field(default=False, description="replace an adapter of this name")


def admin_routes(service: Service) -> APIRouter:
    def check_origin(request: Request) -> None:
        origin = request.headers.get("origin")
        allowed = service.config.allowed_origins
        if origin is None or origin in allowed or "*" in allowed:
            return
        if origin.partition("://")[2] != request.headers.get("host"):
            raise ApiError(403, "web pages of other origins may not call this route: see --allowed-origins, the "
                                "setting of the origins that may")

    routes = APIRouter(dependencies=[Depends(check_origin)])
    routes.include_router(trainer_routes(service))

    @routes.post("/sleep")
    async def sleep(request: Request, level: Annotated[str, Query()] = "1",
                    mode: Annotated[str, Query()] = "keep") -> dict[str, Any]:
        """Free the memory of weights and cache. Requests wait until /wake_up."""
        check_query(request.query_params, ("level", "mode"))
        if mode != "keep":
            raise ApiError(400, f"mode must be keep, got {shown(mode)}: requests wait for /wake_up", param="mode")
        if level not in ("1", "2"):
            raise ApiError(400, f"level must be 1 (weights stay in the host's memory) or 2 (weights are dropped), got "
                                f"{shown(level)}", param="level")
        return asdict(await carried_out(service.host.llm.sleep(int(level))))

    @routes.post("/wake_up")
    async def wake_up(request: Request, tags: Annotated[list[str], Query()] = []) -> dict[str, Any]:  # noqa: B006
        """Restore the weights and the cache, or only the parts that `tags` names."""
        check_query(request.query_params, ("tags",))
        return asdict(await carried_out(service.host.llm.wake_up(tags or None)))

    @routes.get("/is_sleeping")
    async def is_sleeping() -> dict[str, bool]:
        return {"is_sleeping": await service.host.llm.is_sleeping()}

    @routes.post("/reset_prefix_cache")
    async def reset_prefix_cache(request: Request,
                                 reset_running_requests: Annotated[str, Query()] = "false") -> dict[str, bool]:
        """Empty the prefix cache. Pages of running requests stay, unless `reset_running_requests` preempts the
        requests. `success` says whether all pages were removed."""
        check_query(request.query_params, ("reset_running_requests",))
        preempts = truth("reset_running_requests", reset_running_requests)
        return {"success": await carried_out(service.host.llm.reset_prefix_cache(preempts))}

    @routes.post(LOAD_ADAPTER)
    async def load_adapter(body: LoadAdapterRequest) -> Response:
        """Read an adapter from a folder below --lora-root, and serve it as a model of this name."""
        await service.adapters.load(service.host.llm, body.lora_name, body.lora_path, in_place=body.load_inplace)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @routes.post(UNLOAD_ADAPTER)
    async def unload_adapter(body: UnloadAdapterRequest) -> Response:
        """Stop serving an adapter. Running requests keep it until they end."""
        await service.adapters.unload(service.host.llm, body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return routes
