"""Routes for an RL trainer, under vLLM's names. They need --admin. Web pages may call them only from an allowed origin,
as the operator's routes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import Field

from outrider.core.fields import shown
from outrider.core.weights_checksum import WeightsChecksum
from outrider.engine.weight_files import read_packed, read_safetensors
from outrider.server.body_errors import check_query, truth
from outrider.server.errors import ApiError
from outrider.server.protocol import Body
from outrider.server.service import Service
from outrider.server.weight_receiver import Announced, InitTransferRequest, WeightReceiver
from outrider.server.work import carried_out

PAUSE, RESUME = "/pause", "/resume"
START_UPDATE, UPDATE, FINISH_UPDATE = "/start_weight_update", "/update_weights", "/finish_weight_update"
INIT_TRANSFER = "/init_weight_transfer_engine"
CALL = "/collective_rpc"
TRAINER_PATHS = (PAUSE, RESUME, "/is_paused", "/weight_checker", "/weights_checker", START_UPDATE, UPDATE,
                 FINISH_UPDATE, INIT_TRANSFER, CALL, "/shutdown_weight_transfer_engine", "/start_draft_weight_update",
                 "/update_weight_version", "/weight_info", "/abort_requests", "/release_kv_cache_memory",
                 "/get_world_size", "/server_info")


class WeightCheckerRequest(Body):
    action: Literal["checksum", "compare", "reset"]
    baseline: Annotated[dict[str, str], Field(max_length=100_000)] | None = Field(
        default=None, description="checksums by name to compare with; by default those of the first checksum")


class UpdateInfo(Body):
    path: Annotated[str, Field(min_length=1, max_length=4096)] | None = Field(
        default=None, description="below --weights-root; without one, the weights come from a trainer that has joined")
    names: list[str] | None = Field(
        default=None, description="of tensors whose bytes are all that the file has, or that the trainer sends")
    dtype_names: list[str] | None = None
    shapes: list[list[int]] | None = None
    packed: bool | None = Field(default=None, description="is read, and makes no difference")


class UpdateWeightsRequest(Body):
    update_info: UpdateInfo | None = None
    weight_dir: Annotated[str, Field(min_length=1, max_length=4096)] | None = Field(
        default=None, description="prime-rl's way to give a folder below --weights-root")

    def info(self) -> UpdateInfo:
        if (self.update_info is None) == (self.weight_dir is None):
            raise ApiError(400, "give either update_info or weight_dir, not both", param="update_info")
        return self.update_info or UpdateInfo(path=self.weight_dir)


class FinishUpdateRequest(Body):
    weight_version: str | None = Field(default=None, description="must be the version that /weight_info says next")


class VersionRequest(Body):
    new_version: str


class AbortRequestsRequest(Body):
    request_ids: Annotated[list[str], Field(max_length=100_000)] | None = Field(
        default=None, description="ids of answers, or those that clients gave; none: all requests")


class CallRequest(Body):
    method: Annotated[str, Field(min_length=1, max_length=200, description="of --worker-extension-cls")]
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    timeout: float | None = Field(default=None, description="is read, and makes no difference")


class WeightChecker:
    """Compares the checksums of the weights with those of an earlier check."""

    def __init__(self) -> None:
        self._baseline: dict[str, str] | None = None  # of the first checksum after a comparison

    def report(self, found: WeightsChecksum) -> dict[str, Any]:
        checksums = {name: tensor.sha256 for name, tensor in found.tensors.items()}
        is_first = self._baseline is None
        if is_first:
            self._baseline = checksums
        dtypes = {name: tensor.kind or tensor.dtype for name, tensor in found.tensors.items()}
        return {"sha256": found.sha256, "checksums": checksums, "dtypes": dtypes, "coded": found.coded,
                "baseline_created": is_first}

    def compare(self, found: WeightsChecksum, given: dict[str, str] | None) -> dict[str, Any]:
        baseline = self._baseline if given is None else given
        if baseline is None:
            raise ApiError(400, "there is nothing to compare with: ask for a checksum first, or give a baseline",
                           param="baseline")
        if given is None:
            self._baseline = None
        mismatches = found.differences(baseline)
        return {"match": not mismatches, "mismatches": mismatches}


def weights_path(root: str | None, path: str) -> Path:
    """Resolve a client's path. Refuse it if it leads out of the root folder, or if any file or link in its folder
    does."""
    if root is None:
        raise ApiError(403, "this server takes no weights: start it with --weights-root")
    base = Path(root).resolve()
    try:
        found = (base / path).resolve()
        is_below = all(each.is_relative_to(base) and each.exists() for each in _files(found, base))
    except (OSError, ValueError, RuntimeError):  # a loop of links, a null byte
        is_below = False
    if not is_below or (found.is_dir() and not any(found.iterdir())):
        raise ApiError(400, f"path {shown(path)} must be a file or folder below the server's "
                            "--weights-root", param="path")
    return found


def _files(found: Path, base: Path) -> Iterator[Path]:
    """Yield the path and everything in its folders, with links resolved. Folders outside `base` are not entered."""
    seen, left = {found}, [found]
    while left:
        path = left.pop()
        yield path
        inside = {each.resolve() for each in path.iterdir()} if path.is_dir() and path.is_relative_to(base) else set()
        left += inside - seen
        seen |= inside


def trainer_routes(service: Service) -> APIRouter:
    routes = APIRouter()
    _add_pauses(routes, service)
    _add_calls(routes, service)
    _add_updates(routes, service)
    _add_state(routes, service)
    return routes


def _add_pauses(routes: APIRouter, service: Service) -> None:
    @routes.post(PAUSE)
    async def pause(request: Request, mode: Annotated[str, Query()] = "abort",
                    clear_cache: Annotated[str, Query()] = "true") -> dict[str, str]:
        """Run no step until /resume. Running requests are aborted (`abort`), finish first (`wait`), or stay (`keep`).
        Those that stay are computed again after an update of weights, unless `clear_cache` is false."""
        check_query(request.query_params, ("mode", "clear_cache"))
        clears = truth("clear_cache", clear_cache)
        await carried_out(service.host.llm.pause_generation(mode=mode, clear_cache=clears))
        return {"status": "paused"}

    @routes.post(RESUME)
    async def resume() -> dict[str, str]:
        """Continue after /pause."""
        await carried_out(service.host.llm.resume_generation())
        return {"status": "resumed"}

    @routes.get("/is_paused")
    async def is_paused() -> dict[str, bool]:
        return {"is_paused": await service.host.llm.is_paused()}


def _add_calls(routes: APIRouter, service: Service) -> None:
    @routes.post("/abort_requests")
    async def abort_requests(body: AbortRequestsRequest) -> dict[str, Any]:
        """End requests with the tokens that they have. Later requests are served as before."""
        asked = [_ids_of(own) for own in body.request_ids or ()]
        matches = (lambda live: any(own.fullmatch(live) for own in asked)) if asked else (lambda live: True)
        return {"status": "aborted", "aborted": await carried_out(service.host.llm.abort_matching(matches))}

    @routes.post(CALL)
    async def collective_rpc(body: CallRequest) -> dict[str, list[Any]]:
        """Call a method of the class given with --worker-extension-cls: a single time, not in each rank as vLLM."""
        call = service.host.llm.collective_rpc(body.method, body.timeout, body.args, body.kwargs)
        results = await carried_out(call)
        return {"results": [own if own is None or isinstance(own, dict | list) else str(own) for own in results]}

    @routes.post("/release_kv_cache_memory")
    async def release_kv_cache_memory() -> dict[str, str]:
        """Free the memory of the cache. Requests wait until /wake_up?tags=kv_cache."""
        await carried_out(service.host.llm.sleep(1))
        await carried_out(service.host.llm.wake_up(["weights"]))
        return {"status": "kv_cache_released"}


def _ids_of(given: str) -> re.Pattern[str]:
    """Match the engine's ids of a request that has this id in its answer, or this `request_id` in its body."""
    return re.compile(rf"([a-z]+-)?{re.escape(given)}(-[0-9a-f]{{32}})?(-[0-9]+)*")


def _add_updates(routes: APIRouter, service: Service) -> None:
    receiver = WeightReceiver(service.config.weight_transfer_config)
    _add_transfer(routes, receiver)
    _add_checks(routes, service)

    @routes.post("/start_draft_weight_update")
    async def start_draft_weight_update() -> None:
        """Refused: the weights of a drafter come in the update of the model."""
        raise ApiError(400, "a drafter's weights are part of the model's update: send them after "
                            f"{START_UPDATE} under the names of their files, or leave them out")

    @routes.post(START_UPDATE)
    async def start_weight_update() -> dict[str, str]:
        """Begin an update in chunks. Until it has ended, new requests are refused and running ones wait."""
        await carried_out(service.host.llm.start_weight_update())
        return {"status": "started"}

    @routes.post(UPDATE)
    async def update_weights(body: UpdateWeightsRequest) -> dict[str, Any]:
        """Replace weights by those of a file below --weights-root. If an update in chunks has begun, the file is its
        next chunk. Otherwise the file is a complete update, which is applied as a whole or not at all."""
        llm, info = service.host.llm, body.info()
        if info.path is None:
            announced = Announced.from_fields(info.names or [], info.dtype_names or [], info.shapes or [])
            take: Any = llm.load_weights if llm.has_weight_update else llm.update_weights
            await carried_out(receiver.receive(announced, take))
            return {"status": "updated", "weights_version": llm.weights_version}
        path = await asyncio.to_thread(weights_path, service.config.weights_root, info.path)
        try:
            given: Any = path  # the worker reads it
            if info.names is not None:
                given = read_packed(path, info.names, info.dtype_names or [], info.shapes or [])
            elif llm.has_weight_update:
                given = read_safetensors(path)
        except (ValueError, OSError) as error:
            raise ApiError(400, str(error), param="path") from None
        if llm.has_weight_update:
            await carried_out(llm.load_weights(given))
        else:
            await carried_out(llm.update_weights(given))
        return {"status": "updated", "weights_version": llm.weights_version}

    @routes.post(FINISH_UPDATE)
    async def finish_weight_update(body: FinishUpdateRequest | None = None) -> dict[str, Any]:
        """End an update in chunks. If weights are missing, it is refused with their names."""
        llm = service.host.llm
        if body is not None and body.weight_version is not None:
            _check_version(body.weight_version, llm.weights_version + 1, "weight_version")
        report = await carried_out(llm.finish_weight_update())
        return {"status": "finished", "num_tensors": report.num_tensors, "weights_version": llm.weights_version}


def _add_transfer(routes: APIRouter, receiver: WeightReceiver) -> None:
    @routes.post(INIT_TRANSFER)
    async def init_weight_transfer_engine(body: InitTransferRequest) -> dict[str, str]:
        """Connect to a trainer that listens, and that sends weights after each /update_weights without a path."""
        await receiver.join(body.init_info)
        return {"status": "joined"}

    @routes.post("/shutdown_weight_transfer_engine")
    async def shutdown_weight_transfer_engine() -> dict[str, str]:
        """Close the connection to the trainer."""
        await receiver.leave()
        return {"status": "left"}


def _add_checks(routes: APIRouter, service: Service) -> None:
    checker = WeightChecker()

    @routes.post("/weight_checker")
    @routes.post("/weights_checker", include_in_schema=False)  # SGLang's name
    async def check_weights(body: WeightCheckerRequest) -> dict[str, Any]:
        """Compute the SHA-256 of each weight by its name in the checkpoint, or compare it with that of an earlier
        check."""
        if body.action == "reset":
            raise ApiError(400, "action must be checksum or compare: the action reset is not supported, because an "
                                "update that lacks weights is refused anyway", param="action")
        found = await carried_out(service.host.llm.weights_checksum())
        return checker.report(found) if body.action == "checksum" else checker.compare(found, body.baseline)


def _check_version(given: str, counted: int, param: str) -> None:
    if given != str(counted):
        raise ApiError(400, f"{param} {shown(given)} cannot be set: versions are counted, and this one is {counted}: "
                            f"leave {param} out, and read /weight_info", param=param)


def _add_state(routes: APIRouter, service: Service) -> None:
    @routes.get("/weight_info")
    async def weight_info() -> dict[str, Any]:
        """Return how many updates of the weights were completed, as a text under vLLM's name."""
        llm = service.host.llm
        return {"weight_version": str(llm.weights_version), "is_updating": llm.has_weight_update}

    @routes.post("/update_weight_version")
    async def update_weight_version(body: VersionRequest) -> dict[str, Any]:
        """Confirm the version of the weights. Another one is refused, because versions are counted."""
        _check_version(body.new_version, service.host.llm.weights_version, "new_version")
        return {"success": True, "new_version": body.new_version}

    @routes.get("/get_world_size")
    async def get_world_size(request: Request, include_dp: Annotated[str, Query()] = "true") -> dict[str, int]:
        """Return how many processes of the server take weights from a trainer: one, which gives them to all ranks."""
        check_query(request.query_params, ("include_dp",))
        truth("include_dp", include_dp)
        return {"world_size": 1}

    @routes.get("/server_info")
    async def server_info(request: Request, config_format: Annotated[str, Query()] = "json") -> dict[str, Any]:
        """Return the settings that trainers ask for, as vLLM nests them."""
        check_query(request.query_params, ("config_format",))
        if config_format != "json":
            raise ApiError(400, f"config_format must be json, got {shown(config_format)}", param="config_format")
        return {"vllm_config": _settings_to_json(service)}


def _settings_to_json(service: Service) -> dict[str, Any]:
    config = service.host.llm.vllm_config
    own = config.model_config.engine_config
    adapters = None
    if own is not None and own.enable_lora:
        adapters = {"max_lora_rank": own.max_lora_rank, "max_loras": own.max_loras}
    model = {name: getattr(config.model_config, name) for name in (
        "model", "dtype", "max_model_len", "max_logprobs", "enforce_eager")}
    model["logprobs_mode"] = f"{config.model_config.logprobs_mode}_logprobs"
    return {"weight_transfer_config": service.config.weight_transfer_config, "lora_config": adapters,
            "model_config": model, "parallel_config": asdict(config.parallel_config)}
