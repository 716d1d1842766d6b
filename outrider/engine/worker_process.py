"""A worker in child processes, one for each rank. Batches, commands and answers are pickled and go through pipes.

The children are spawned and share no memory with their parent except their `RankStatus`. An error at their start is
raised here with the same type and message. If a child dies, hangs or fails alone, all children are ended. Every step in
flight and every later step then fails with WorkerDied. The same happens if an interrupt cuts off a batch on its way to
the children. This file imports no torch; the children do."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from outrider.config import EngineConfig
from outrider.core import ScheduledBatch, StepResult
from outrider.core.lazy_exports import LateModule
from outrider.core.ranks import RankLost
from outrider.engine import rank_watch
from outrider.engine.errand_answers import ErrandAnswers
from outrider.engine.rank_answers import RankAnswers, fail
from outrider.engine.rank_processes import RankStarter, make_links
from outrider.engine.rank_watch import RankProcess, RankWatch, death_of
from outrider.engine.worker_messages import ErrandDone, Failure, OfCommand, OfErrand
from outrider.feature_list import registered_names
from outrider.models.rank_sizes import check_heads
from outrider.models.sources.model_source import ModelSource
from outrider.runner.commands import Answer, Command, Errand, PrepareIdle
from outrider.runner.interface import WorkerDied, WorkerInfo

if TYPE_CHECKING:
    from outrider.engine.hosts import node_ranks
else:
    node_ranks = LateModule("outrider.engine.hosts.node_ranks")

AT_EXIT = 0  # when this process ends: before multiprocessing asks its children to end by SIGTERM, and waits for them
CLOSE_SECONDS = 30.0  # until children that were asked to end are ended
KILL_SECONDS = 5.0  # until nobody waits any longer for a child that was killed
CAUSE_SECONDS = 2.0  # that a start which failed waits for the cause: other ranks may fail with it, or because of it
CUT_OFF = ("an interrupt (KeyboardInterrupt) cut off a message on its way to the worker process, which was ended "
           "because it could not read on: start the engine again")
log = logging.getLogger("outrider")
Given = TypeVar("Given")


class RankPipe(Protocol):
    """The methods of the pipe to a rank that the parent uses. The rank may run on another machine."""

    def send_bytes(self, data: bytes | memoryview, /) -> None: ...

    def recv_bytes(self) -> bytes: ...

    def recv(self) -> Any: ...


class WorkerProcess:
    """A Runner whose worker lives in child processes. The constructor starts the children and waits until they are
    ready."""

    info: WorkerInfo

    def __init__(self, config: EngineConfig, source: ModelSource) -> None:
        num_ranks = config.tensor_parallel_size
        check_heads(source.config, num_ranks, str(source.config_file))
        start = _start if config.nnodes == 1 else node_ranks.start_over_nodes
        self._ranks, self._pipes = start(config, source)
        Finalize(None, _kill, args=(self._ranks,), exitpriority=AT_EXIT)
        self._answers = RankAnswers(num_ranks, [own.place for own in self._ranks])
        self._errands = ErrandAnswers(num_ranks)
        self._numbers = count()
        self._sending = threading.RLock()  # steps come from one thread, and errands from any
        self._is_sending = False  # or an interrupt has cut off what was being sent
        self._died: WorkerDied | None = None
        self._is_closing = False
        self._change = threading.Condition()  # of the next two, and of `_died`
        self._started: dict[int, WorkerInfo | Failure] = {}  # by rank
        self._is_ready = False
        self._watch = RankWatch(self._ranks)
        for rank, pipe in enumerate(self._pipes):
            threading.Thread(target=self._read, args=(rank, pipe), name="outrider-worker-reader", daemon=True).start()
        if num_ranks > 1:
            threading.Thread(target=self._look, name="outrider-rank-watch", daemon=True).start()
        try:
            self.info = self._wait_until_ready()
        except BaseException:
            self._is_closing = True
            _kill(self._ranks)
            raise

    def begin(self, errand: Errand) -> Future[None]:
        number, done = self._errands.add()
        with suppress(OSError):  # a child is gone; its reader says so
            self._send(OfErrand(number), errand)
        if self._died is not None:  # perhaps before this errand was noted
            self._errands.fail_all(self._died)
        return done

    def submit(self, batch: ScheduledBatch) -> Future[StepResult]:
        number = next(self._numbers)
        return self._ask(number, Future[StepResult](), None, (number, batch))

    def command(self, command: Command[Answer]) -> Future[Answer]:
        number = next(self._numbers)
        return self._ask(number, Future[Answer](), command, OfCommand(number), command)

    def _ask(self, number: int, future: Future[Given], command: Command[Any] | None, *messages: Any) -> Future[Given]:
        """Send messages under one number. Returns a future of the answer with that number."""
        self._answers.add(number, future, command)
        try:
            self._send(*messages)
        except OSError:  # a child is gone; its reader finds out and ends all that wait
            with self._change:
                self._change.wait_for(lambda: self._died is not None)
        except Exception:  # a message that cannot be pickled: no child has seen it
            self._answers.drop(number)
            raise
        if self._died is not None:  # perhaps before this message was noted
            fail(future, self._died)
        return future

    def idle(self, quiet_seconds: float) -> float | None:
        if len(self._ranks) == 1:
            return None  # the child sees for itself when there is nothing to do
        return self.command(PrepareIdle(quiet_seconds)).result()

    @property
    def is_alive(self) -> bool:
        return self._died is None

    @property
    def process_ids(self) -> list[int | None]:
        """The process ids of the ranks."""
        return [own.process.pid for own in self._ranks]

    def close(self) -> None:
        self._is_closing = True
        with suppress(OSError):  # they have ended already
            self._send(None)
        until = time.monotonic() + CLOSE_SECONDS
        for own in self._ranks:
            own.process.join(max(0.0, until - time.monotonic()))
        _kill(self._ranks)

    def kill(self) -> None:
        """Kill children that no longer answer. Their steps fail with WorkerDied."""
        if len(self._ranks) > 1:
            self._end(WorkerDied(f"no step has ended for too long: {self._watch.blamed()}"))
        _kill(self._ranks)

    def _send(self, *messages: Any) -> None:
        pickled = [ForkingPickler.dumps(message) for message in messages]
        with self._sending:
            if self._is_sending:  # a child cannot make sense of what follows a part of a message
                self._end(WorkerDied(CUT_OFF))
            self._is_sending = True
            try:
                for pipe in self._pipes:
                    for one in pickled:
                        pipe.send_bytes(one)
            except OSError:  # the child is gone: nobody reads the part of a message
                self._is_sending = False
                raise
            self._is_sending = False

    # Threads that read the pipes and watch the children

    def _read(self, rank: int, pipe: RankPipe) -> None:
        while True:
            try:
                message = pipe.recv()
                if isinstance(message, OfCommand):
                    message = (message.number, _read_answer(pipe.recv_bytes()))
            except (EOFError, OSError):
                break
            match message:
                case logging.LogRecord():
                    _log(message)
                case (int(number), answer):
                    error = self._answers.take(rank, number, answer)
                    if error is not None:
                        self._end(error)
                case ErrandDone():
                    self._errands.take(message)
                case Failure() | WorkerInfo():
                    with self._change:
                        self._started[rank] = message
                        self._change.notify_all()
                    if isinstance(message, Failure):
                        return
        own = self._ranks[rank]
        own.process.join(CLOSE_SECONDS)
        self._end(death_of(own, len(self._ranks), "" if self._is_ready else "while it started"))

    def _look(self) -> None:
        """Watch the ranks until they have ended. If one hangs or was left behind, end all of them."""
        last = time.monotonic()
        while self._died is None:
            time.sleep(rank_watch.LOOK_SECONDS)
            now = time.monotonic()
            has_any = not self._is_ready or self._answers.has_any
            error = self._answers.overdue(rank_watch.STRAGGLER_SECONDS) or self._watch.look(
                now - last, has_steps=self._answers.has_steps, has_any=has_any)
            last = now
            if error is not None and not self._failures:  # a start that has failed is ended by the thread that waits
                self._end(error)

    def _end(self, error: WorkerDied) -> None:
        """End all children. Every step then fails with the first error that was given to this method."""
        with self._change:
            if self._died is None:
                self._died = WorkerDied("the worker was closed") if self._is_closing else error
                if self._is_ready and not self._is_closing and len(self._ranks) > 1:
                    log.error("%s", error)  # an idle engine has no request that would tell it
            self._change.notify_all()
        _kill(self._ranks)
        self._answers.fail_all(self._died)
        self._errands.fail_all(self._died)

    # Start

    def _wait_until_ready(self) -> WorkerInfo:
        def is_decided() -> bool:
            return self._died is not None or bool(self._failures) or len(self._started) == len(self._ranks)

        def is_explained() -> bool:
            return self._died is not None or len(self._failures) == len(self._ranks)

        with self._change:
            self._change.wait_for(is_decided)
            if self._failures:
                self._change.wait_for(is_explained, CAUSE_SECONDS if len(self._ranks) > 1 else 0)
                raise self._explained()
            if self._died is not None:
                raise self._died
            self._is_ready = True
        infos = [own for own in self._started.values() if isinstance(own, WorkerInfo)]
        if any((own.limits, own.num_pages) != (infos[0].limits, infos[0].num_pages) for own in infos):
            raise RuntimeError("the ranks disagree on their limits or numbers of pages: this is a bug: please report "
                               "it with the name of the model")
        return infos[0]

    @property
    def _failures(self) -> dict[int, Failure]:
        return {rank: own for rank, own in self._started.items() if isinstance(own, Failure)}

    def _explained(self) -> BaseException:
        """Return the error to raise for a failed start: the error of the first rank that did not fail because of
        another rank."""
        failures = self._failures
        causes = {rank: own for rank, own in failures.items() if not issubclass(own.kind, RankLost)}
        if not causes and self._died is not None:
            return self._died
        rank, cause = min((causes or failures).items())
        error = cause.to_error()
        is_common = len(causes) == len(self._ranks) and len({own.message for own in causes.values()}) == 1
        if not is_common:
            error.args = (f"rank {rank}{self._ranks[rank].place}: {cause.message}",)
        return error


def _start(config: EngineConfig, source: ModelSource) -> tuple[Sequence[RankProcess], Sequence[RankPipe]]:
    """Start a process for each rank. Returns the processes and the pipes to them, in the order of ranks."""
    links = make_links(range(1, config.tensor_parallel_size))
    ends = {0: tuple(first for first, _ in links.values())} | {rank: (end,) for rank, (_, end) in links.items()}
    started = RankStarter(config, source, registered_names(), log.getEffectiveLevel()).start(ends)
    return [one.own for one in started], [one.pipe for one in started]


def _kill(ranks: Sequence[RankProcess]) -> None:
    """Kill the processes and wait for them for a limited time, because a device that hangs may hold a process for
    long."""
    for own in ranks:
        own.process.kill()
    for own in ranks:
        own.process.join(KILL_SECONDS)


def _read_answer(pickled: bytes) -> Any:
    try:
        return ForkingPickler.loads(pickled)
    except Exception as error:  # its class may not be importable here
        return Failure.from_error(error)


def _log(record: logging.LogRecord) -> None:
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)
