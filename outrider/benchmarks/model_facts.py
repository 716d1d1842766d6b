"""MeasureFacts: a command to a worker, which answers with the sizes of its model and the speeds of its device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outrider.runner.commands import Command
from outrider.simulation.cost_table import ModelFacts


@dataclass(frozen=True)
class MeasureFacts(Command[ModelFacts]):
    name: str  # of the model

    def carry_out(self, worker: Any) -> ModelFacts:
        # Only the worker's process has torch.
        from outrider.benchmarks.prompt_work import PromptWork, measure_product
        from outrider.benchmarks.roofline import Traffic, measure_bandwidth

        model = worker.device_step.model
        return ModelFacts(
            self.name, weight_bytes=Traffic(model).weights.dense + sum(
                count * size for count, size in Traffic(model).weights.experts),
            token_operations=PromptWork(model).token_operations,
            num_layers=len({claim.layer for claim in model.cache_layers()}), hidden_size=worker.info.limits.hidden_size,
            itemsize=model.dtype.itemsize, bandwidth=measure_bandwidth(model.device),
            operations=measure_product(model.device, model.dtype),
        )
