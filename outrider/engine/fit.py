"""Chooses an engine's settings by the device's memory, if the setting `fit` is on, and explains why an engine had too
little memory. No torch.

A process that measures a GPU's memory occupies some hundred MiB of it until the process ends. So if the worker runs in
a separate process, a short-lived third process measures the memory before the worker starts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, TypeVar

from outrider.config import EngineConfig
from outrider.core.lazy_exports import LateModule
from outrider.core.status_line import status_line
from outrider.engine.spawned import check_sent, spawn_process
from outrider.engine.worker_messages import Failure
from outrider.models.sources.model_source import ModelSource
from outrider.runner.interface import NoDeviceMemory

if TYPE_CHECKING:
    from outrider.fitting import at_start
else:
    at_start = LateModule("outrider.fitting.at_start")  # with torch

T = TypeVar("T")
log = logging.getLogger("outrider")


def fit_to_memory(config: EngineConfig, source: ModelSource, *, apart: bool = False) -> EngineConfig:
    """Return the config with the settings that fit the device's memory, if the config asks for them. apart: whether a
    separate process measures the memory."""
    if not config.fit:
        return config
    with status_line("fitting the settings to the memory"):
        config, lines = _call(_fit, config, source, apart)
    for line in lines:
        log.info("%s", line)
    return config


def explained(lack: str, config: EngineConfig, source: ModelSource, *, apart: bool = False) -> NoDeviceMemory:
    """Return the error of an engine that had too little memory, with the settings that would help most. lack: the
    message of the error. The error object itself would keep loaded weights in memory."""
    try:
        advice = _call(_advise, config, source, apart)
    except Exception as error:  # the lack is what the user must see
        log.debug("no smaller settings could be found: %r", error)
        advice = f"`outrider fit {config.model}` shows what fits"
    return NoDeviceMemory(f"{lack}; {advice}")


def _fit(config: EngineConfig, source: ModelSource) -> tuple[EngineConfig, list[str]]:
    return at_start.fit_to_device(config, source)


def _advise(config: EngineConfig, source: ModelSource) -> str:
    return at_start.advice_for(config, source)


def _call(work: Callable[[EngineConfig, ModelSource], T], config: EngineConfig, source: ModelSource,
          apart: bool) -> T:
    if not apart:
        return work(config, source)
    check_sent(config, source)
    own, childs = Pipe()
    process = spawn_process(_answer, (childs, work, config, source), name="outrider-fit", daemon=True)
    childs.close()
    try:
        answer: T | Failure = own.recv()
    except EOFError:
        raise RuntimeError("the process that measures the device's memory has ended without a result") from None
    finally:
        process.join()
        own.close()
    if isinstance(answer, Failure):
        raise answer.to_error()
    return answer


def _answer(pipe: Connection, work: Callable[[EngineConfig, ModelSource], T], config: EngineConfig,
            source: ModelSource) -> None:
    try:
        pipe.send(work(config, source))
    except BaseException as error:
        pipe.send(Failure.from_error(error))
