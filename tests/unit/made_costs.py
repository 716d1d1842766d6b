"""Cost tables made by hand, for tests of simulations: an engine with a small pool, whose steps take round numbers."""

from __future__ import annotations

from typing import Any

from outrider.cache.groups import LayerCache, plan_groups
from outrider.cache.kinds import FullSpec, PagedSpec, RecurrentSpec, SlidingSpec
from outrider.core import Limits
from outrider.core.costs import MixedStepCosts, ReadCost, StepCosts
from outrider.runner.interface import BoundedSteps, MeasuredDrafting, NoDrafting, UnboundedSteps, WorkerInfo
from outrider.simulation.cost_table import CostTable, DecodeSteps, HostCosts, ModelFacts, PromptSteps

FULL, WINDOW = FullSpec(2, 64, 2), SlidingSpec(2, 64, 2, window=48)
STATE = RecurrentSpec(conv_dim=8, conv_width=4, state_shape=(4, 4), gate_sizes=(4,), out_dim=8, itemsize=2)
FACTS = ModelFacts("made", weight_bytes=8 << 30, token_operations=8 << 30, num_layers=4, hidden_size=1024, itemsize=2,
                   bandwidth=4e12, operations=4e14)
DRAFT_COSTS = StepCosts((1, 8, 64), (4e-3, 4.2e-3, 7e-3), is_padded=True)
PROMPT_COSTS = MixedStepCosts((64, 128, 256, 512), (5e-3, 6e-3, 9e-3, 16e-3))


def made_table(specs: tuple[PagedSpec | RecurrentSpec, ...] = (FULL,), *, num_pages: int = 400, max_requests: int = 8,
               max_drafts: int = 0, depth: int = 2, bounds_steps: bool = False, **fields: Any) -> CostTable:
    layout = plan_groups([LayerCache(index, spec) for index, spec in enumerate(specs)], checkpoint_interval=64)
    limits = Limits(max_requests, 512, 2048, max_drafts, 32000, steps_in_flight=depth)
    drafting = MeasuredDrafting(max_drafts, DRAFT_COSTS, False) if max_drafts else NoDrafting()
    prompt_steps = BoundedSteps(12e-3, PROMPT_COSTS) if bounds_steps else UnboundedSteps()
    info = WorkerInfo(limits, layout, num_pages, 0, drafting, (), prompt_steps)
    decoding = tuple(DecodeSteps(drafts, (1, 8, 64), (4e-3 + 5e-4 * drafts, 4.2e-3 + 6e-4 * drafts, 7e-3))
                     for drafts in range(max_drafts + 1))
    settings: dict[str, Any] = {
        "reading": (ReadCost(None, 1e-7),), "attending": (ReadCost(None, 1e-9),), "acceptance": (0.8, 0.5)[:max_drafts],
        "host": HostCosts(2e-4, 1e-5, 1e-3), "prompts": (PromptSteps(0, (16, 512), (5e-3, 20e-3)),),
    }
    return CostTable(FACTS, info, decoding=decoding, **(settings | fields))
