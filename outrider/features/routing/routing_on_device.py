"""RoutingOnDevice: the worker's part of routed experts. It watches the routers of the target in every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from outrider.config import EngineConfig
from outrider.core import Admission, Limits, RequestResult, ScheduledBatch, StepPart, StepResult
from outrider.drafters.base import Drafter
from outrider.features.routing.routing_in_engine import RoutedStep, RoutingPart
from outrider.layers import Router
from outrider.layers.base import find_modules
from outrider.models.base import Model
from outrider.runner.step import DeviceStep
from outrider.runner.worker_feature import WorkerFeature

BYTE_EXPERTS = 256  # numbers of so many experts fit into a byte


class RoutingOnDevice(WorkerFeature):
    name = "routed experts"
    is_captured = False

    def __init__(self, config: EngineConfig) -> None: ...

    def limit(self, limits: Limits, model: Model, drafter: Drafter | None) -> Limits:
        if not find_modules([model], Router):
            raise ValueError("enable_return_routed_experts: no layer of this model has a router that can be watched: "
                             "leave it out")
        return limits

    def attach(self, step: DeviceStep, model: Model, limits: Limits) -> None:
        recorder = RoutingRecorder(find_modules([model], Router), model.num_layers)
        step.add_part(recorder)
        step.turns.reporters = (*step.turns.reporters, recorder)


class RoutingRecorder(StepPart):
    """Keeps the experts that routers choose in each step until the step's result is read."""

    def __init__(self, routers: Sequence[Router], num_layers: int) -> None:
        rules = [router.rule for router in routers]
        is_small = max(rule.num_experts for rule in rules) <= BYTE_EXPERTS
        self._dtype = torch.uint8 if is_small else torch.int32
        self._shape = num_layers, max(rule.top_k for rule in rules)
        self._last = max(router.index for router in routers)
        self._rows: set[int] = set()  # of requests that want their experts
        self._step: int | None = None  # the step that runs; None if no request wants its experts
        self._wanted: list[bool] = []  # by request of this step
        self._chosen: torch.Tensor | None = None  # [token rows, layers, experts of a token] of this step
        self._done: dict[int, tuple[torch.Tensor, list[bool]]] = {}  # on the host, by step
        for router in routers:
            router.observer = self._observe

    def begin(self, batch: ScheduledBatch) -> None:
        for admission in batch.admissions:
            self._admit(admission)
        self._wanted = [row in self._rows for row in batch.rows]
        self._step, self._chosen = (batch.step if any(self._wanted) else None), None

    def amend_result(self, batch: ScheduledBatch, result: StepResult) -> StepResult:
        if batch.step not in self._done:
            return result
        chosen, wanted = self._done.pop(batch.step)
        host, requests, start = chosen.numpy(), list[RequestResult](), 0
        parts = zip(result.requests, wanted, batch.num_known, batch.num_drafts, strict=True)
        for part, is_wanted, num_known, num_drafts in parts:
            own = host[start : start + part.num_computed]  # accepted drafts come before rejected ones
            start += num_known + num_drafts
            # A view would keep the whole step alive.
            requests.append(part._replace(parts=(RoutedStep(own.copy()),)) if is_wanted and len(own) else part)
        return replace(result, requests=requests)

    def reset(self) -> None:
        self._step, self._chosen = None, None
        self._done.clear()

    def _admit(self, admission: Admission) -> None:
        wants = admission.request.generates and admission.request.part(RoutingPart) is not None
        (self._rows.add if wants else self._rows.discard)(admission.row)

    def _observe(self, layer: int, ids: torch.Tensor) -> None:
        if self._step is None:
            return
        if self._chosen is None:
            self._chosen = torch.zeros(ids.shape[0], *self._shape, dtype=self._dtype, device=ids.device)
        self._chosen[:, layer, : ids.shape[1]] = ids
        if layer == self._last:
            self._done[self._step], self._chosen = (_begin_copy(self._chosen), self._wanted), None


def _begin_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Queue a copy to the host, which is there when the step's result is."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
