"""The code that runs in a worker's child process. It loads the worker, runs the batches and commands that the parent
sends, and answers. Imports no torch before it is started.

The child ends when its parent does, also while it loads a model. It ignores signals that reach the whole group of
processes: the parent lets running requests end before it ends the child. With several ranks each gets the same messages
in the same order. Rank 0 answers all of them, the others only commands and failures.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, NamedTuple

from outrider.config import EngineConfig
from outrider.core.deep_thread import end_process
from outrider.core.lazy_exports import LateModule
from outrider.engine.collector import freeze_heap
from outrider.engine.quiet import wait_for
from outrider.engine.worker_messages import ErrandDone, Failure, OfCommand, OfErrand
from outrider.feature_list import require_registered
from outrider.kernels.compiler_start import hash_compiler_ahead
from outrider.models.sources.model_source import ModelSource
from outrider.runner.interface import RunningWorker
from outrider.runner.rank_link import RankLink
from outrider.runner.rank_status import Doing, RankStatus

if TYPE_CHECKING:
    from outrider.runner import rank_group
    from outrider.runner import worker as workers
else:  # with torch
    rank_group = LateModule("outrider.runner.rank_group")
    workers = LateModule("outrider.runner.worker")

BEAT_SECONDS = 0.25  # between two signs of life of a rank
IN_FLIGHT_SECONDS = 0.05  # until a child whose steps are in flight looks again whether they are over
log = logging.getLogger("outrider")


@dataclass(frozen=True)
class RankPlace:
    """The place of a child among the ranks of a worker, given to the child when it starts."""

    link: RankLink
    numbers: Any  # shared memory of its RankStatus
    process_ids: Any  # shared memory of all ranks: their processes
    features: tuple[str, ...] = ()  # names of features that are registered in the parent

    @property
    def is_alone(self) -> bool:
        return self.link.count == 1


class QueuedWork(NamedTuple):
    """A step or a command that is in flight."""

    number: int
    future: Future[Any]
    is_command: bool


def serve(pipe: Connection, config: EngineConfig, source: ModelSource, level: int, place: RankPlace) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # a handler, because what is ignored stays so in programs run here
        signal.signal(number, _leave_to_parent)
    status = RankStatus(place.numbers)
    place.process_ids[place.link.rank] = os.getpid()
    threading.Thread(target=_end_with_parent, args=(place,), name="outrider-parent-watch", daemon=True).start()
    threading.Thread(target=_show_life, args=(status,), name="outrider-life", daemon=True).start()
    to_parent = _ToParent(pipe, place.link)
    log.setLevel(level if place.link.rank == 0 else max(level, logging.WARNING))  # every rank would say the same
    log.handlers, log.propagate = [to_parent], False
    hash_compiler_ahead(config.device)
    try:
        require_registered(place.features)
        worker = _load(config, source, place, status)
    except BaseException as error:
        to_parent.send(Failure.from_error(error))
        return
    freeze_heap(worker)
    status.begin(Doing.NOTHING)
    to_parent.send(worker.info)
    try:
        _run(pipe, to_parent, worker, place, status)
    except (EOFError, OSError):
        return  # the parent is gone


def _load(config: EngineConfig, source: ModelSource, place: RankPlace, status: RankStatus) -> RunningWorker:
    link = replace(place.link, status=status)
    config = replace(config, device=rank_group.device_of_rank(config.device, link))
    return workers.Worker.load(config, source, ranks=rank_group.join_ranks(link, status, config.device))


def _run(pipe: Connection, to_parent: _ToParent, worker: RunningWorker, place: RankPlace, status: RankStatus) -> None:
    asked: queue.SimpleQueue[QueuedWork | None] = queue.SimpleQueue()
    flight = Flight(status)
    answers = threading.Thread(target=_answer, args=(asked, to_parent, flight, place.link.rank == 0), daemon=True)
    answers.start()

    def take(seconds: float | None) -> tuple[Any] | None:
        return (pipe.recv(),) if pipe.poll(seconds) else None

    def idle(quiet_seconds: float) -> float | None:
        # A rank does nothing by itself: what it prepared could be a sum that the other ranks do not run.
        return flight.idle(worker, quiet_seconds) if place.is_alone else None

    while (message := wait_for(take, idle)[0]) is not None:
        if isinstance(message, OfErrand):
            _begin(worker, message.number, pipe.recv_bytes(), to_parent)
            continue
        flight.num_queued += 1
        if isinstance(message, OfCommand):
            status.begin(Doing.COMMAND, message.number)
            asked.put(QueuedWork(message.number, _carry_out(worker, pipe.recv_bytes()), True))
        else:
            number, batch = message
            status.begin(Doing.STEP, number)
            asked.put(QueuedWork(number, worker.submit(batch), False))
    asked.put(None)
    answers.join()
    worker.close()
    end_process(0)


def _leave_to_parent(*_: object) -> None:
    """Ignore a signal. Ctrl-C, and the SIGTERM of `timeout` or of a service manager, reach the whole group of
    processes, and the parent acts on them."""


def _end_with_parent(place: RankPlace) -> None:
    """End this process when its parent ends, even in the middle of work. Otherwise it could hold device memory for
    minutes while it loads a model. The other ranks are ended too, since one of them may be stopped."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    for other in place.process_ids:
        if other not in (0, os.getpid()):  # 0: it has not begun
            with suppress(OSError):  # it has ended
                os.kill(other, signal.SIGKILL)
    os._exit(1)


def _show_life(status: RankStatus) -> None:
    while True:
        status.beat()
        time.sleep(BEAT_SECONDS)


class _ToParent(logging.Handler):
    """Sends messages and log records to the parent. May be used by several threads."""

    def __init__(self, pipe: Connection, link: RankLink) -> None:
        super().__init__()
        self._pipe, self._sending = pipe, threading.Lock()
        self._prefix = "" if link.count == 1 else f"rank {link.rank}{link.host.words}: "

    def send(self, *messages: Any) -> None:
        pickled = [ForkingPickler.dumps(message) for message in messages]
        with self._sending:
            for one in pickled:
                self._pipe.send_bytes(one)

    def emit(self, record: logging.LogRecord) -> None:
        # Parts that may not be picklable are made words here.
        record.msg, record.args, record.exc_info = self._prefix + record.getMessage(), (), None
        self.send(record)


class Flight:
    """Counts the steps and commands of the child that are in flight, which one thread queues and another answers."""

    def __init__(self, status: RankStatus) -> None:
        self.num_queued = self.num_answered = 0
        self._status = status
        self._last_answer = 0.0

    def answered(self) -> None:
        self._last_answer = time.perf_counter()
        self.num_answered += 1
        if self.num_answered == self.num_queued:
            self._status.begin(Doing.NOTHING)

    def idle(self, worker: RunningWorker, quiet_seconds: float) -> float | None:
        """Let the worker prepare for later steps if nothing is in flight (see `Runner.idle`). Called by the thread that
        reads the pipe, with the seconds since the last message."""
        if self.num_answered < self.num_queued:
            return IN_FLIGHT_SECONDS
        return worker.idle(min(quiet_seconds, time.perf_counter() - self._last_answer))


def _begin(worker: RunningWorker, number: int, pickled: bytes, to_parent: _ToParent) -> None:
    """Begin an errand (work beside the steps), and send an answer when it is done."""
    def answer(done: Future[Any]) -> None:
        error = done.exception()
        with suppress(OSError):  # the parent is gone
            to_parent.send(ErrandDone(number, None if error is None else str(error)))

    _read_and_do(worker.begin, pickled).add_done_callback(answer)


def _carry_out(worker: RunningWorker, pickled: bytes) -> Future[Any]:
    """Let the worker carry out a command, and return a future of its answer."""
    return _read_and_do(worker.command, pickled)


def _read_and_do(do: Callable[[Any], Future[Any]], pickled: bytes) -> Future[Any]:
    """Unpickle an object and call `do` with it. The future gets the result, or the error if the object cannot be read
    or `do` fails."""
    try:
        return do(ForkingPickler.loads(pickled))
    except BaseException as error:
        failed: Future[Any] = Future()
        failed.set_exception(error)
        return failed


def _answer(asked: queue.SimpleQueue[QueuedWork | None], to_parent: _ToParent, flight: Flight,
            answers_all: bool) -> None:
    """Wait for steps and commands in their order and send their answers. Meanwhile another thread queues the next
    ones."""
    while (one := asked.get()) is not None:
        number, future, is_command = one
        try:
            message: Any = future.result()
        except BaseException as error:
            message = Failure.from_error(error)
        try:
            if is_command:
                to_parent.send(OfCommand(number), message)
            elif answers_all or isinstance(message, Failure):
                to_parent.send((number, message))
        except OSError:
            return  # the parent is gone
        except Exception as error:  # an answer that cannot be pickled
            to_parent.send((number, Failure.from_error(error)))
        flight.answered()
