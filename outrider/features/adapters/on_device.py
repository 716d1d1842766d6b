"""AdaptersOnDevice: the worker's part of adapters. It sizes their device memory, and gives each step the adapter
store."""

from __future__ import annotations

from dataclasses import replace

from outrider.config import EngineConfig
from outrider.core import Limits
from outrider.drafters.base import Drafter
from outrider.features.adapters.limits import AdapterLimits
from outrider.features.adapters.store import AdapterStore
from outrider.features.adapters.targets import Targets
from outrider.models.base import Model
from outrider.runner.memory import FeatureBytes
from outrider.runner.step import DeviceStep
from outrider.runner.worker_feature import WorkerFeature


class AdaptersOnDevice(WorkerFeature):
    name = "adapters"

    def __init__(self, config: EngineConfig) -> None:
        self._max_loras, self._max_rank = config.max_loras, config.max_lora_rank
        self._memory_bytes = config.lora_memory_bytes

    def limit(self, limits: Limits, model: Model, drafter: Drafter | None) -> Limits:
        return with_adapters(limits, model, self._max_loras, self._max_rank, self._memory_bytes)

    def num_bytes(self, limits: Limits, model: Model) -> FeatureBytes:
        return FeatureBytes(buffers=AdapterLimits.of(limits).numbers * model.dtype.itemsize)

    def attach(self, step: DeviceStep, model: Model, limits: Limits) -> None:
        step.take_deltas(AdapterStore(model, self._max_rank, limits))


def with_adapters(limits: Limits, model: Model, max_loras: int, max_rank: int, memory_bytes: int | None) -> Limits:
    """Return the limits with the sizes of the adapters' buffers. By default there is room for `max_loras` adapters of
    the largest rank on all planned targets."""
    targets = Targets.from_model(model)
    numbers = max_loras * targets.planned_room(max_rank)
    if memory_bytes is not None:
        numbers = memory_bytes // model.dtype.itemsize
    return replace(limits, parts=(*limits.parts, AdapterLimits(max_loras, len(targets.all), numbers)))
