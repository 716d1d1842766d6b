"""Makes an engine around a worker that has started. No torch."""

from __future__ import annotations

from collections import ChainMap
from typing import TYPE_CHECKING

from outrider.config import EngineConfig
from outrider.core import FaultRecord
from outrider.core.lazy_exports import LateModule
from outrider.engine.engine import Engine
from outrider.engine.engine_feature import EngineFeature, EngineTools
from outrider.engine.engine_features import EngineFeatures
from outrider.engine.live_requests import LiveRequests
from outrider.engine.make_scheduler import make_scheduler
from outrider.engine.request_checks import RequestChecks
from outrider.engine.served_model import ServedModel
from outrider.engine.stats import EngineStats, HostFaultsWatcher, StatsLog
from outrider.engine.step_watcher import StepWatcher
from outrider.engine.worker_line import WorkerLine
from outrider.feature_list import engine_features
from outrider.runner.interface import RunningWorker
from outrider.sched.scheduler import Scheduler

if TYPE_CHECKING:
    from outrider.drafters import suffix
    from outrider.engine import acceptance_alarm as alarm
    from outrider.engine import kv_events as cache_events
    from outrider.engine.kv_events import EventSockets
    from outrider.engine.text import Tokenizer
else:
    alarm = LateModule("outrider.engine.acceptance_alarm")
    cache_events = LateModule("outrider.engine.kv_events")
    suffix = LateModule("outrider.drafters.suffix")


def engine_around(config: EngineConfig, worker: RunningWorker, tokenizer: Tokenizer | None = None,
                  event_sockets: EventSockets | None = None) -> Engine:
    """Make an engine for a worker that has started. The engine then owns the worker and closes it. `event_sockets`: the
    sockets on which cache events are published."""
    info, has_suffixes = worker.info, "suffix" in config.draft_methods
    of_settings: list[EngineFeature] = engine_features(config)
    stats, watchers, host_faults = EngineStats(), list[StepWatcher](), None
    if info.limits.max_drafts:
        watchers.append(StatsLog(stats))
    if has_suffixes:
        never = {token for part in info.limits.parts for token in part.placeholders}
        host_faults = FaultRecord.for_drafter(suffix.SuffixDrafter())
        watchers.append(HostFaultsWatcher(stats, host_faults))
    if event_sockets is not None:
        labels = ChainMap(*(feature.page_labels() for feature in of_settings))
        watchers.append(cache_events.KvEvents(info.layout, event_sockets, labels))

    def scheduler(generation: int) -> Scheduler:
        return make_scheduler(info, enable_prefix_caching=config.enable_prefix_caching, generation=generation,
                              host_drafter=suffix.SuffixDrafter(never=never) if has_suffixes else None,
                              host_faults=host_faults, features=of_settings)

    model = ServedModel(config.model, info.limits, info.eos_ids, tokenizer, info.classes, info.takes_extra_keys,
                        info.device_name, config,
                        takes_images=any(part.takes_images for part in info.limits.parts))
    line = WorkerLine(worker)
    features = EngineFeatures(config, of_settings, EngineTools(info, model, line.order, worker.begin))
    requests = LiveRequests(model, features.keepers, config.seed)
    if info.limits.max_drafts:
        watchers.append(alarm.AcceptanceAlarm(stats, lambda: requests.weights_version))
    return Engine(scheduler, line, RequestChecks(model, features), requests, stats, watchers=watchers,
                  submits_early=config.overlap is not False)
