"""ProcessorsOnDevice: the worker's part of logits processors. It makes them, and runs them in every step."""

from __future__ import annotations

from importlib import import_module

from outrider.config import EngineConfig
from outrider.core import Limits
from outrider.drafters.base import Drafter
from outrider.features.processors.rows import EngineProcessor, ProcessorRows
from outrider.logits_processors import load_processors
from outrider.models.base import Model
from outrider.runner.step import DeviceStep
from outrider.runner.worker_feature import WorkerFeature


class ProcessorsOnDevice(WorkerFeature):
    name = "logits_processors"
    edits_logits = True

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._processors: list[EngineProcessor] = []

    def limit(self, limits: Limits, model: Model, drafter: Drafter | None) -> Limits:
        """Make the logits processors. They get the settings as a `VllmConfig`, which they expect. A processor that
        cannot be made raises its error here, before memory is measured."""
        groups = import_module("outrider.compat.vllm_config")  # by name: the package lies above this one
        settings = groups.VllmConfig.from_engine_config(self._config, limits)
        kinds = load_processors(self._config.logits_processors)
        self._processors = [EngineProcessor(kind, settings, model.device) for kind in kinds]
        return limits

    def attach(self, step: DeviceStep, model: Model, limits: Limits) -> None:
        step.edit_logits(ProcessorRows(self._processors, step.state, limits))
