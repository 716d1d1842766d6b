"""Makes the scheduler for a worker that has started, with an empty cache and the choice of drafts. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from outrider import speculation
from outrider.cache.manager import CacheManager
from outrider.cache.pages import PagePool
from outrider.core import FaultRecord
from outrider.core.lazy_exports import LateModule
from outrider.core.speculation import NO_SPECULATION, Speculation
from outrider.engine.engine_feature import EngineFeature
from outrider.runner.interface import BoundedSteps, FixedDrafting, MeasuredDrafting, NoDrafting, WorkerInfo
from outrider.sched.full_step import UNBOUNDED_PROMPTS, UnboundedPrompts
from outrider.sched.scheduler import Scheduler

if TYPE_CHECKING:
    from outrider.sched import prompt_time
else:
    prompt_time = LateModule("outrider.sched.prompt_time")


def make_scheduler(info: WorkerInfo, *, enable_prefix_caching: bool = True, generation: int = 0,
                   host_drafter: speculation.HostDrafter | None = None, host_faults: FaultRecord | None = None,
                   features: Sequence[EngineFeature] = ()) -> Scheduler:
    """Make a scheduler with an empty cache, for a worker that has described itself by `info`."""
    cache = CacheManager(info.layout, PagePool(info.num_pages), info.limits, lookahead=info.lookahead,
                         enable_prefix_caching=enable_prefix_caching)
    for feature in features:
        cache = feature.make_cache(cache)
    resources = [feature.make_resource(info) for feature in features]
    return Scheduler(cache, info.limits, speculation=_speculation(info, host_drafter, host_faults),
                     prompt_time=_prompt_time(info), generation=generation,
                     resources=[resource for resource in resources if resource is not None])


def _speculation(info: WorkerInfo, host_drafter: speculation.HostDrafter | None,
                 host_faults: FaultRecord | None) -> Speculation:
    counts: speculation.DraftCounts
    match info.drafting:
        case FixedDrafting(num_drafts):
            counts = speculation.FixedDrafts(num_drafts)
        case MeasuredDrafting(max_drafts, costs, always_propose):
            counts = speculation.auto_drafts(max_drafts, costs, always_propose=always_propose)
        case NoDrafting():
            return NO_SPECULATION
    if host_drafter is None:
        return speculation.StepDrafts(counts)
    limits = info.limits
    return speculation.StepDraftsWithHost(
        counts, speculation.HostDrafts(host_drafter, limits.vocab_size, host_faults, limits.max_drafts))


def _prompt_time(info: WorkerInfo) -> UnboundedPrompts:
    match info.prompt_steps:
        case BoundedSteps(max_seconds, costs):
            return prompt_time.PromptTime(max_seconds, costs)
    return UNBOUNDED_PROMPTS
