"""Starts an engine from a config: finds the model, starts a worker, which holds the device, and makes an engine around
it. No torch.
"""

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
from outrider.runner.interface import RunningWorker

if TYPE_CHECKING:
    from outrider.engine import kv_events, worker_process
    from outrider.runner import worker as workers
else:
    kv_events = LateModule("outrider.engine.kv_events")
    worker_process = LateModule("outrider.engine.worker_process")  # with multiprocessing
    workers = LateModule("outrider.runner.worker")  # with torch, which a process without a device does not import

PROCESS_ID = os.getpid()  # the process that imported this module
T = TypeVar("T")


def start_engine(config: EngineConfig, *, in_process: bool = False) -> Engine:
    """Start an engine. `in_process`: whether the worker runs in this process instead of in one of its own. With several
    ranks each rank always has its own process."""
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
    tokenizer = load_tokenizer(config, source)
    worker: RunningWorker
    if in_process:
        worker = worker_process.WorkerProcess(config, source)
    else:
        with collections_paused(), status_line("starting torch"):
            load_worker = workers.Worker.load

        load = partial(load_worker, config, source, loading_bar(source.name))
        worker = load() if os.getpid() == PROCESS_ID else _in_thread(load)
    engine = engine_around(config, worker, tokenizer, sockets)
    freeze_heap(engine)
    return engine


def _in_thread(work: Callable[[], T]) -> T:
    """Run the work in a new thread, because this process may have been forked. A thread that computed matrix products
    before the fork would wait for ever for its OpenMP threads, which a fork does not copy."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()
