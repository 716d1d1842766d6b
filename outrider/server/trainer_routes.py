"""Routes of a trainer, under vLLM's names. They need --admin; the same web pages may call them as the operator's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import Field

from outrider.core.weights_checksum import WeightsChecksum
from outrider.server.body_errors import check_query, truth
from outrider.server.errors import ApiError
from outrider.server.protocol import Body
from outrider.server.service import Service
from outrider.server.work import carried_out

TRAINER_PATHS = ("/pause", "/resume", "/is_paused", "/weight_checker", "/weights_checker")


class WeightCheckerRequest(Body):
    action: Literal["checksum", "compare", "reset"]
    baseline: Annotated[dict[str, str], Field(max_length=100_000)] | None = Field(
        default=None, description="checksums by name to compare with; by default those of the first checksum")


class WeightChecker:
    """Compares the checksums of weights with those of an earlier time."""

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


def trainer_routes(service: Service) -> APIRouter:
    routes, checker = APIRouter(), WeightChecker()

    @routes.post("/pause")
    async def pause(request: Request, mode: Annotated[str, Query()] = "abort",
                    clear_cache: Annotated[str, Query()] = "true") -> dict[str, str]:
        """Run no step until /resume. Running requests end (`abort`), run to their ends first (`wait`), or stay (`keep`)
        and are computed again after an update of weights, unless `clear_cache` is false."""
        check_query(request.query_params, ("mode", "clear_cache"))
        clears = truth("clear_cache", clear_cache)
        await carried_out(service.host.llm.pause_generation(mode=mode, clear_cache=clears))
        return {"status": "paused"}

    @routes.post("/resume")
    async def resume() -> dict[str, str]:
        """Go on after /pause."""
        await carried_out(service.host.llm.resume_generation())
        return {"status": "resumed"}

    @routes.get("/is_paused")
    async def is_paused() -> dict[str, bool]:
        return {"is_paused": await service.host.llm.is_paused()}

    @routes.post("/weight_checker")
    @routes.post("/weights_checker", include_in_schema=False)  # SGLang's name
    async def check_weights(body: WeightCheckerRequest) -> dict[str, Any]:
        """Compute the SHA-256 of each weight by its name in the checkpoint, or compare it with an earlier one."""
        if body.action == "reset":
            raise ApiError(400, "action must be checksum or compare: weights are not destroyed to see that new ones "
                                "come, as an update that is not whole is refused", param="action")
        found = await carried_out(service.host.llm.weights_checksum())
        return checker.report(found) if body.action == "checksum" else checker.compare(found, body.baseline)

    return routes
