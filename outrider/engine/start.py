"""Starts an engine from a config: finds the model, starts a worker (which owns the device), and makes an engine around
it. No torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from outrider.config import EngineConfig
from outrider.core.lazy_exports import LateModule
from outrider.core.status_line import status_line
from outrider.engine.assembly import engine_around
from outrider.engine.collector import collections_paused, freeze_heap
from outrider.engine.engine import Engine
from outrider.engine.load import find_model, load_tokenizer
from outrider.engine.progress import loading_bar
from outrider.engine.script_import import end_if_importing_script
from outrider.engine.torch_libraries import load_torch_libraries_ahead
from outrider.kernels.compiler_start import hash_compiler_ahead
from outrider.models.sources.model_source import ModelSource
from outrider.runner.interface import NoDeviceMemory, RunningWorker

if TYPE_CHECKING:
    from outrider.engine import fit, kv_events, worker_process
    from outrider.runner import worker as workers
else:
    fit = LateModule("outrider.engine.fit")
    kv_events = LateModule("outrider.engine.kv_events")
    worker_process = LateModule("outrider.engine.worker_process")  # with multiprocessing
    workers = LateModule("outrider.runner.worker")  # with torch, which a process without a device does not import

PROCESS_ID = os.getpid()  # the process that imported this module
T = TypeVar("T")


def start_engine(config: EngineConfig, *, in_process: bool = False) -> Engine:
    """Start an engine. `in_process`: True runs the worker in a process of its own, False in the process of the caller.
    With several ranks each rank always has its own process."""
    end_if_importing_script()
    sockets = None if config.kv_events is None else kv_events.EventSockets(config.kv_events)
    try:
        return _start_around(config, sockets, in_process or config.tensor_parallel_size > 1)
    except BaseException:
        if sockets is not None:
            sockets.close()
        raise


def _start_around(config: EngineConfig, sockets: kv_events.EventSockets | None, in_process: bool) -> Engine:
    if not in_process:
        load_torch_libraries_ahead()
        hash_compiler_ahead(config.device)
    source = find_model(config)
    if config.fit:
        config = fit.fit_to_memory(config, source, apart=in_process)
    tokenizer = load_tokenizer(config, source)
    worker = _start_worker(config, source, in_process)
    engine = engine_around(config, worker, tokenizer, sockets)
    freeze_heap(engine)
    return engine


def _start_worker(config: EngineConfig, source: ModelSource, in_process: bool) -> RunningWorker:
    try:
        return _make_worker(config, source, in_process)
    except NoDeviceMemory as error:
        lack = str(error)
    raise fit.explained(lack, config, source, apart=in_process)


def _make_worker(config: EngineConfig, source: ModelSource, in_process: bool) -> RunningWorker:
    if in_process:
        return worker_process.WorkerProcess(config, source)
    with collections_paused(), status_line("starting torch"):
        load_worker = workers.Worker.load
    load = partial(load_worker, config, source, loading_bar(source.name))
    return load() if os.getpid() == PROCESS_ID else _in_thread(load)


def _in_thread(work: Callable[[], T]) -> T:
    """Run the work in a new thread, because this process may have been forked. A thread that computed matrix products
    before the fork would wait forever for OpenMP threads, because a fork does not copy them."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()
