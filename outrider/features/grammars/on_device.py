"""GrammarsOnDevice: the worker's part of structured outputs. It keeps compiled grammars, and makes a step's masks on
the host between the forward pass and the sampler."""

from __future__ import annotations

from outrider.config import EngineConfig
from outrider.core import Limits
from outrider.features.grammars.compiled_forms import CompiledForms
from outrider.features.grammars.rows import GrammarRows
from outrider.models.base import Model
from outrider.runner.step import DeviceStep
from outrider.runner.worker_feature import WorkerFeature


class GrammarsOnDevice(WorkerFeature):
    name = "grammars"

    def __init__(self, config: EngineConfig) -> None:
        self.forms = CompiledForms()

    def attach(self, step: DeviceStep, model: Model, limits: Limits) -> None:
        step.take_turns(GrammarRows(step.state, limits, self.forms, step.ranks.link))
