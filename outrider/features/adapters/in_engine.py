"""AdaptersInEngine: the engine's part of adapters. It makes the adapter slots of each scheduler, and the registry of
loads. No torch."""

from __future__ import annotations

from outrider.config import EngineConfig
from outrider.engine.engine_feature import EngineFeature, EngineTools
from outrider.features.adapters.limits import AdapterLimits
from outrider.features.adapters.loads import AdapterRegistry
from outrider.features.adapters.slots import AdapterSlots
from outrider.runner.interface import WorkerInfo


class AdaptersInEngine(EngineFeature):
    def __init__(self, config: EngineConfig) -> None:
        self._max_loaded = config.max_cpu_loras or 4 * config.max_loras
        self._sizes: dict[int, int] = {}  # of loads that are there, by number: slots read what the registry writes
        self._labels: dict[str, str] = {}
        self._slots: AdapterSlots | None = None  # of the newest scheduler

    def make_resource(self, info: WorkerInfo) -> AdapterSlots:
        limits = AdapterLimits.of(info.limits)
        self._slots = AdapterSlots(limits.slots, limits.numbers, self._sizes)
        return self._slots

    def make_keeper(self, tools: EngineTools) -> AdapterRegistry:
        return AdapterRegistry(self._max_loaded, AdapterLimits.of(tools.info.limits).slots, tools.order,
                               self._current_slots, self._sizes, self._labels)

    def page_labels(self) -> dict[str, str]:
        return self._labels

    def _current_slots(self) -> AdapterSlots:
        assert self._slots is not None, "an engine makes its scheduler first"
        return self._slots
