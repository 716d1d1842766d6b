"""From a config to a running engine: a worker with the device, and around it the parts that need none. No torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from outrider.cache.manager import CacheManager
from outrider.config import EngineConfig
from outrider.core import FaultRecord
from outrider.core.status_line import status_line
from outrider.core.structured import StructuredOutputsParams
from outrider.drafters.suffix import SuffixDrafter
from outrider.engine.collector import collections_paused, freeze_heap
from outrider.engine.engine import Engine
from outrider.engine.grammar import GrammarCompiler
from outrider.engine.load import find_model, load_tokenizer
from outrider.engine.progress import loading_bar
from outrider.engine.text import Tokenizer
from outrider.engine.torch_libraries import load_torch_libraries_ahead
from outrider.kernels.compiler_start import hash_compiler_ahead
from outrider.models.sources import ModelSource
from outrider.runner.interface import BoundedSteps, FixedDrafting, MeasuredDrafting, RunningWorker, WorkerInfo
from outrider.sched.drafts import DraftCounts, FixedDrafts, auto_drafts
from outrider.sched.prompt_time import PromptTime
from outrider.sched.scheduler import Scheduler

PROCESS_ID = os.getpid()  # the process that imported this module
T = TypeVar("T")


def start_engine(config: EngineConfig, *, in_process: bool = False) -> Engine:
    """`in_process`: the worker gets a process of its own; otherwise it lives in this one."""
    if not in_process:
        load_torch_libraries_ahead()
        hash_compiler_ahead(config.device)
    source = find_model(config)
    tokenizer = load_tokenizer(config, source)
    worker: RunningWorker
    if in_process:
        from outrider.engine.worker_process import WorkerProcess  # with multiprocessing, which others do not need

        child = WorkerProcess(config, source)
        worker, grammars = child, _grammars(tokenizer, source, child.announce)
    else:
        with collections_paused(), status_line("starting torch"):
            from outrider.runner.worker import Worker  # torch is imported here, and only if the worker lives here too

        grammars = _grammars(tokenizer, source)
        load = partial(Worker.load, config, source, grammars, loading_bar(source.name))
        worker = load() if os.getpid() == PROCESS_ID else _in_thread(load)
    engine = engine_around(config, worker, tokenizer, grammars)
    freeze_heap(engine)
    return engine


def _in_thread(work: Callable[[], T]) -> T:
    """Runs the work in a thread of its own, for a process that was forked: a thread that has computed before the fork
    waits for ever for the threads that helped it (OpenMP's), which the fork did not copy."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def _grammars(tokenizer: Tokenizer | None, source: ModelSource,
              announce: Callable[[StructuredOutputsParams], None] | None = None) -> GrammarCompiler | None:
    return None if tokenizer is None else GrammarCompiler(lambda: tokenizer, source.eos_token_ids, announce)


def engine_around(config: EngineConfig, worker: RunningWorker, tokenizer: Tokenizer | None = None,
                  grammars: GrammarCompiler | None = None) -> Engine:
    """An engine for a worker that has started. It belongs to the engine from now on. Without `grammars`, which the
    worker must have too, structured output is refused."""
    info, speculative = worker.info, config.speculative
    has_suffixes = speculative is not None and "suffix" in speculative.methods
    host_faults = FaultRecord.for_drafter(SuffixDrafter()) if has_suffixes else None

    def make_scheduler(generation: int) -> Scheduler:
        cache = CacheManager(info.layout, info.num_pages, info.limits, lookahead=info.lookahead,
                             enable_prefix_caching=config.enable_prefix_caching)
        return Scheduler(cache, info.limits, drafts=_draft_counts(info), generation=generation,
                         host_drafter=SuffixDrafter() if has_suffixes else None, host_faults=host_faults,
                         prompt_time=_prompt_time(info))

    return Engine(make_scheduler, worker, info.limits, tokenizer=tokenizer, eos_ids=info.eos_ids, seed=config.seed,
                  max_logprobs=config.max_logprobs, submits_early=config.overlap is not False,
                  takes_spans=info.takes_spans, grammars=grammars, host_faults=host_faults, model_name=config.model)


def _draft_counts(info: WorkerInfo) -> DraftCounts | None:
    match info.drafting:
        case FixedDrafting(num_drafts):
            return FixedDrafts(num_drafts)
        case MeasuredDrafting(max_drafts, costs, always_propose):
            return auto_drafts(max_drafts, costs, always_propose=always_propose)
    return None


def _prompt_time(info: WorkerInfo) -> PromptTime | None:
    match info.prompt_steps:
        case BoundedSteps(max_seconds, costs):
            return PromptTime(max_seconds, costs)
    return None
