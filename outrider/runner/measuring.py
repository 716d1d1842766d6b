"""Measures the costs of steps when a worker starts. The engine uses them to choose numbers of drafts and to bound the
tokens of prompts in a step.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from outrider.config import EngineConfig
from outrider.core import Limits
from outrider.core.lazy_exports import LateModule
from outrider.core.status_line import status_line
from outrider.runner import graphs
from outrider.runner.interface import BoundedSteps, FixedDrafting, MeasuredDrafting, NoDrafting, UnboundedSteps
from outrider.runner.local import LocalRunner
from outrider.runner.memory import enough_memory
from outrider.runner.step import DeviceStep

if TYPE_CHECKING:
    from outrider.runner import remembered_costs
    from outrider.runner.graphs import CudaRunner
else:
    remembered_costs = LateModule("outrider.runner.remembered_costs")

CAPTURE_ADVICE = "lower gpu_memory_utilization or max_num_seqs, or set enforce_eager"
log = logging.getLogger("outrider")


def measure_drafting(config: EngineConfig, step: DeviceStep, limits: Limits,
                     runner: LocalRunner | CudaRunner) -> NoDrafting | FixedDrafting | MeasuredDrafting:
    speculative = config.speculative
    if speculative is None:
        return NoDrafting() if step.drafter is None else FixedDrafting(step.drafter.max_drafts)
    if not speculative.auto:
        return FixedDrafting(speculative.num_speculative_tokens)
    with status_line("measuring what steps cost"):
        if not isinstance(runner, LocalRunner):
            with enough_memory("captured steps", CAPTURE_ADVICE):
                runner.capture_fewer_drafts()
            costs = graphs.measure_costs(step, limits, runner.graphs)
        else:
            is_default = config.shipped_drafter is not None
            costs = runner.on_thread(lambda: remembered_costs.remembered_costs(config, step, limits)
                                     if is_default else graphs.measure_costs(step, limits))
    log.info("ms of a step by tokens: %s; of proposing by requests: %s; of a logit row: %.4f plain, %.4f filtered",
             ", ".join(f"{n}: {s * 1e3:.1f}" for n, s in zip(costs.tokens, costs.seconds, strict=True)),
             ", ".join(f"{n}: {first * 1e3:.2f} + {each * 1e3:.2f} for each further draft"
                       for n, first, each in costs.drafting) or "nothing",
             *(seconds * 1e3 for seconds in costs.logit_row_seconds[1:]))
    has_layers = step.drafter is not None and bool(step.drafter.attention_layers)
    return MeasuredDrafting(speculative.num_speculative_tokens, costs, always_propose=not has_layers)


def bound_prompts(config: EngineConfig, step: DeviceStep, limits: Limits,
                  runner: LocalRunner | CudaRunner) -> UnboundedSteps | BoundedSteps:
    if config.max_step_ms is None or isinstance(runner, LocalRunner):
        return UnboundedSteps()
    max_seconds = config.max_step_ms * 1e-3
    with status_line("measuring what steps with prompts cost"):
        costs = graphs.measure_mixed_costs(step, limits, runner.graphs, max_seconds)
    log.info("ms of a step with prompts by tokens: %s; limit while other requests decode: %.1f ms",
             ", ".join(f"{n}: {s * 1e3:.1f}" for n, s in zip(costs.tokens, costs.seconds, strict=True)),
             config.max_step_ms)
    return BoundedSteps(max_seconds, costs)
