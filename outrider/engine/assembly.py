"""An engine around a worker that has started: the cache manager, the scheduler and the choice of drafts. No torch."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from outrider.cache.manager import CacheManager
from outrider.cache.pages import PagePool
from outrider.config import EngineConfig
from outrider.core import FaultRecord
from outrider.core.lazy_exports import LateModule
from outrider.core.request_keeper import RequestKeepers
from outrider.engine.engine import Engine
from outrider.engine.engine_feature import EngineFeature
from outrider.engine.request_checks import RequestChecks
from outrider.engine.served_model import ServedModel
from outrider.feature_list import engine_features
from outrider.runner.interface import BoundedSteps, FixedDrafting, MeasuredDrafting, RunningWorker, WorkerInfo
from outrider.sched.scheduler import Scheduler
from outrider.speculation.draft_counts import DraftCounts, FixedDrafts

if TYPE_CHECKING:
    from outrider.drafters import suffix
    from outrider.engine import kv_events as cache_events
    from outrider.engine.grammar import GrammarCompiler
    from outrider.engine.kv_events import EventSockets
    from outrider.engine.text import Tokenizer
    from outrider.sched import prompt_time
    from outrider.sched.prompt_time import PromptTime
    from outrider.speculation import auto_drafts
    from outrider.speculation.host_drafts import HostDrafter
else:
    auto_drafts = LateModule("outrider.speculation.auto_drafts")
    cache_events = LateModule("outrider.engine.kv_events")
    prompt_time = LateModule("outrider.sched.prompt_time")
    suffix = LateModule("outrider.drafters.suffix")


def engine_around(config: EngineConfig, worker: RunningWorker, tokenizer: Tokenizer | None = None,
                  grammars: GrammarCompiler | None = None, event_sockets: EventSockets | None = None) -> Engine:
    """An engine for a worker that has started. It belongs to the engine from now on. Without `grammars`, which the
    worker must have too, structured output is refused. `event_sockets`: where events of the cache are published."""
    info, speculative = worker.info, config.speculative
    has_suffixes = speculative is not None and "suffix" in speculative.methods
    host_faults = FaultRecord.for_drafter(suffix.SuffixDrafter()) if has_suffixes else None

    features: list[EngineFeature] = engine_features(config)
    labels = ChainMap(*(feature.page_labels() for feature in features))
    kv_events = None if event_sockets is None else cache_events.KvEvents(info.layout, event_sockets, labels)

    def scheduler(generation: int) -> Scheduler:
        made = make_scheduler(info, enable_prefix_caching=config.enable_prefix_caching, generation=generation,
                              host_drafter=suffix.SuffixDrafter() if has_suffixes else None, host_faults=host_faults,
                              features=features)
        if kv_events is not None:
            kv_events.follow(made.cache.pool)
        return made

    model = ServedModel(config.model, info.limits, info.eos_ids, tokenizer, info.classes, info.takes_spans,
                        info.device_name)
    engine = Engine(scheduler, worker, RequestChecks(model, grammars, features), seed=config.seed,
                    submits_early=config.overlap is not False, host_faults=host_faults, kv_events=kv_events)
    keepers = [feature.make_keeper(info, engine.order) for feature in features]
    engine.keepers = RequestKeepers([keeper for keeper in keepers if keeper is not None])
    return engine


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
