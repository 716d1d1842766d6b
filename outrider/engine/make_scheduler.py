"""The scheduler of a worker that has started, with an empty cache and the choice of drafts. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from outrider.cache.manager import CacheManager
from outrider.cache.pages import PagePool
from outrider.core import FaultRecord
from outrider.core.lazy_exports import LateModule
from outrider.engine.engine_feature import EngineFeature
from outrider.runner.interface import BoundedSteps, FixedDrafting, MeasuredDrafting, WorkerInfo
from outrider.sched.scheduler import Scheduler
from outrider.speculation.draft_counts import DraftCounts, FixedDrafts

if TYPE_CHECKING:
    from outrider.sched import prompt_time
    from outrider.sched.prompt_time import PromptTime
    from outrider.speculation import auto_drafts
    from outrider.speculation.host_drafts import HostDrafter
else:
    auto_drafts = LateModule("outrider.speculation.auto_drafts")
    prompt_time = LateModule("outrider.sched.prompt_time")


def make_scheduler(info: WorkerInfo, *, enable_prefix_caching: bool = True, generation: int = 0,
                   host_drafter: HostDrafter | None = None, host_faults: FaultRecord | None = None,
                   features: Sequence[EngineFeature] = ()) -> Scheduler:
    """A scheduler with an empty cache, for a worker that describes itself so."""
    cache = CacheManager(info.layout, PagePool(info.num_pages), info.limits, lookahead=info.lookahead,
                         enable_prefix_caching=enable_prefix_caching)
    resources = [feature.make_resource(info) for feature in features]
    return Scheduler(cache, info.limits, drafts=_draft_counts(info), generation=generation,
                     host_drafter=host_drafter, host_faults=host_faults, prompt_time=_prompt_time(info),
                     resources=[resource for resource in resources if resource is not None])


def _draft_counts(info: WorkerInfo) -> DraftCounts | None:
    match info.drafting:
        case FixedDrafting(num_drafts):
            return FixedDrafts(num_drafts)
        case MeasuredDrafting(max_drafts, costs, always_propose):
            return auto_drafts.auto_drafts(max_drafts, costs, always_propose=always_propose)
    return None


def _prompt_time(info: WorkerInfo) -> PromptTime | None:
    match info.prompt_steps:
        case BoundedSteps(max_seconds, costs):
            return prompt_time.PromptTime(max_seconds, costs)
    return None
