"""A worker in a process of its own: batches, commands and their answers go through a pipe, pickled.

The child is spawned, so it shares nothing with its parent; it ends when the parent does, also while it loads a model.
Signals that reach the whole group of processes are the parent's: it lets running requests end before it ends the child.
What goes wrong at its start is raised here as the same type with the same message. If the child dies, every step in
flight and every later one fails with WorkerDied; so it is when an interrupt cuts off a batch on its way to the child.
This file imports no torch; the child does.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import Finalize
from typing import Any, TypeAlias, TypeVar

from outrider.config import EngineConfig
from outrider.core import ScheduledBatch, StepResult
from outrider.core.drafter_faults import words_of
from outrider.core.structured import StructuredOutputsParams
from outrider.engine.collector import freeze_heap
from outrider.engine.grammar.deep_thread import end_process
from outrider.engine.load import grammars_of
from outrider.engine.quiet import wait_for
from outrider.kernels.compiler_start import hash_compiler_ahead
from outrider.models.sources.base import ModelSource
from outrider.runner.commands import Answer, Command
from outrider.runner.interface import Runner, WorkerDied, WorkerInfo

AT_EXIT = 0  # when this process ends: before multiprocessing asks its children to end by SIGTERM, and waits for them
CLOSE_SECONDS = 30.0  # until a child that was asked to end is ended
IN_FLIGHT_SECONDS = 0.05  # until a child whose steps are in flight looks again whether they are over
TORCH_FREE = ("builtins", "outrider.core", "outrider.runner.interface", "outrider.runner.commands",
              "outrider.models.sources", "outrider.models.config_reader")
log = logging.getLogger("outrider")
Given = TypeVar("Given")
_Asked: TypeAlias = tuple[int, Future[Any], bool]  # a step or a command with its number, and whether it is a command


@dataclass(frozen=True)
class OfCommand:
    """Goes before a command, and before the answer of one. These are read by themselves: a command may be of any class,
    and if one side cannot read an object of the other, only that command fails."""

    number: int


@dataclass(frozen=True)
class Failure:
    """An exception that crosses the pipe: pickling it whole would call its constructor with other arguments."""

    kind: type[BaseException]
    message: str
    trace: str

    @classmethod
    def from_error(cls, error: BaseException) -> Failure:
        trace = "".join(traceback.format_exception(error))
        if not isinstance(error, Exception):  # sys.exit() in a command is not the parent's exit
            return cls(RuntimeError, words_of(error), trace)
        # The nearest type that the parent can import without torch.
        kind = next(t for t in type(error).__mro__ if t.__module__.startswith(TORCH_FREE))
        try:
            return cls(kind, str(error), trace)
        except Exception:  # an exception whose message cannot be made
            return cls(kind, words_of(error), trace)

    def to_error(self) -> BaseException:
        error = self.kind.__new__(self.kind, self.message)
        error.args = (self.message,)
        error.add_note(f"In the worker process:\n{self.trace}")
        return error


class WorkerProcess:
    """Starts the child and waits until it is ready; then a Runner like any other."""

    info: WorkerInfo

    def __init__(self, config: EngineConfig, source: ModelSource) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, config, source, log.getEffectiveLevel()),
                                        name="outrider-worker", daemon=True)
        self._process.start()
        Finalize(None, self._process.kill, exitpriority=AT_EXIT)
        theirs.close()  # or the pipe would not end with the child
        # By the number of the step or command: an interrupt may come between what `_ask` notes here and what it sends.
        self._waiting: dict[int, Future[Any]] = {}
        self._numbers = count()
        self._sending = threading.RLock()  # steps come from one thread, and announcements from any
        self._is_sending = False  # or an interrupt has cut off what was being sent
        self._died: WorkerDied | None = None
        self._is_closing = False
        self.info = self._receive_info()
        self._reader = threading.Thread(target=self._read, name="outrider-worker-reader", daemon=True)
        self._reader.start()

    def announce(self, form: StructuredOutputsParams) -> None:
        """A request with this form may come: the child compiles its grammar meanwhile, so that no step waits for it."""
        with suppress(OSError):  # the child is gone; the reader says so
            self._send(form)

    def submit(self, batch: ScheduledBatch) -> Future[StepResult]:
        number = next(self._numbers)
        return self._ask(number, Future[StepResult](), (number, batch))

    def command(self, command: Command[Answer]) -> Future[Answer]:
        number = next(self._numbers)
        return self._ask(number, Future[Answer](), OfCommand(number), command)

    def _ask(self, number: int, future: Future[Given], *messages: Any) -> Future[Given]:
        """Send numbered messages. The future gets the answer of that number."""
        self._waiting[number] = future
        try:
            self._send(*messages)
        except OSError:  # the child is gone; the reader finds out and ends all that wait
            self._reader.join()
        except Exception:  # a message that cannot be pickled: the child has not seen it
            del self._waiting[number]
            raise
        if self._died is not None:  # perhaps before the reader could know of this message
            _fail(future, self._died)
        return future

    def idle(self, quiet_seconds: float) -> float | None:
        return None  # the child sees for itself when there is nothing to do

    @property
    def is_alive(self) -> bool:
        return self._died is None

    def close(self) -> None:
        self._is_closing = True
        with suppress(OSError):  # it has ended already
            self._send(None)
        self._process.join(CLOSE_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def kill(self) -> None:
        """Ends a child that no longer answers: its steps fail with WorkerDied."""
        self._process.kill()

    def _send(self, *messages: Any) -> None:
        pickled = [ForkingPickler.dumps(message) for message in messages]
        with self._sending:
            if self._is_sending:  # the child cannot make sense of what follows a part of a message
                self._process.kill()
            self._is_sending = True
            for one in pickled:
                self._pipe.send_bytes(one)
            self._is_sending = False

    def _receive_info(self) -> WorkerInfo:
        while True:
            try:
                message = self._pipe.recv()
            except (EOFError, OSError):
                raise self._death("while it started") from None
            match message:
                case logging.LogRecord():
                    _log(message)
                case Failure():
                    self._process.join()
                    raise message.to_error()
                case WorkerInfo():
                    return message

    def _read(self) -> None:
        while True:
            try:
                message = self._pipe.recv()
                if isinstance(message, OfCommand):
                    message = (message.number, _read_answer(self._pipe.recv_bytes()))
            except (EOFError, OSError):
                break
            match message:
                case logging.LogRecord():
                    _log(message)
                case (number, Failure() as failure):
                    self._waiting.pop(number).set_exception(failure.to_error())
                case (number, answer):
                    self._waiting.pop(number).set_result(answer)
        self._died = self._death("")
        for future in list(self._waiting.values()):
            _fail(future, self._died)

    def _death(self, when: str) -> WorkerDied:
        self._process.join(CLOSE_SECONDS)
        code = self._process.exitcode
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        if self._is_closing:
            return WorkerDied("the worker was closed")
        return WorkerDied(f"the worker process died {when}".rstrip() + f" ({how}): its own messages may say why; on "
                          "Linux, SIGKILL often means that the machine had no memory left")


def _fail(future: Future[Any], error: WorkerDied) -> None:
    with suppress(InvalidStateError):  # told already
        future.set_exception(error)


def _read_answer(pickled: bytes) -> Any:
    try:
        return ForkingPickler.loads(pickled)
    except Exception as error:  # its class may not be importable here
        return Failure.from_error(error)


def _log(record: logging.LogRecord) -> None:
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)


# In the child


def _leave_to_parent(*_: object) -> None:
    """Ctrl-C, and the SIGTERM of `timeout` or of a service manager, reach the whole group of processes."""


def _end_with_parent() -> None:
    """Whatever the child is doing: a model may take minutes to load, and hold a device's memory until then."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


class _ToParent(logging.Handler):
    def __init__(self, send: Callable[[Any], None]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        record.msg, record.args, record.exc_info = record.getMessage(), (), None  # what may not be picklable
        self._send(record)


def _serve(pipe: Connection, config: EngineConfig, source: ModelSource, level: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # a handler, because what is ignored stays so in programs run here
        signal.signal(number, _leave_to_parent)
    threading.Thread(target=_end_with_parent, name="outrider-parent-watch", daemon=True).start()
    lock = threading.Lock()

    def send(*messages: Any) -> None:
        pickled = [ForkingPickler.dumps(message) for message in messages]
        with lock:
            for one in pickled:
                pipe.send_bytes(one)

    log.setLevel(level)
    log.handlers, log.propagate = [_ToParent(send)], False
    hash_compiler_ahead(config.device)
    try:
        from outrider.runner.worker import Worker

        grammars = grammars_of(config, source)
        worker = Worker.load(config, source, grammars)
    except BaseException as error:
        send(Failure.from_error(error))
        return
    freeze_heap(worker)
    send(worker.info)
    asked: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
    flight = _Flight()
    answers = threading.Thread(target=_answer, args=(asked, send, flight), daemon=True)
    answers.start()

    def take(seconds: float | None) -> tuple[Any] | None:
        return (pipe.recv(),) if pipe.poll(seconds) else None

    try:
        while (message := wait_for(take, lambda quiet: flight.idle(worker, quiet))[0]) is not None:
            if isinstance(message, StructuredOutputsParams):
                grammars.start(message)
                continue
            flight.num_queued += 1
            if isinstance(message, OfCommand):
                asked.put((message.number, _carry_out(worker, pipe.recv_bytes()), True))
            else:
                number, batch = message
                asked.put((number, worker.submit(batch), False))
        asked.put(None)
        answers.join()
        worker.close()
        end_process(0)
    except (EOFError, OSError):
        return  # the parent is gone


class _Flight:
    """Which steps and commands of the child are in flight: those that one thread has queued, and the other has not
    answered."""

    def __init__(self) -> None:
        self.num_queued = self.num_answered = 0
        self._last_answer = 0.0

    def answered(self) -> None:
        self._last_answer = time.perf_counter()
        self.num_answered += 1

    def idle(self, worker: Runner, quiet_seconds: float) -> float | None:
        """See `Runner.idle`. The reader of the pipe calls this, with the seconds that no message came."""
        if self.num_answered < self.num_queued:
            return IN_FLIGHT_SECONDS
        return worker.idle(min(quiet_seconds, time.perf_counter() - self._last_answer))


def _carry_out(worker: Runner, pickled: bytes) -> Future[Any]:
    """The answer of a command. Whatever goes wrong with the command is its answer, also that it cannot be read."""
    try:
        return worker.command(ForkingPickler.loads(pickled))
    except BaseException as error:
        failed: Future[Any] = Future()
        failed.set_exception(error)
        return failed


def _answer(asked: queue.SimpleQueue[_Asked | None], send: Callable[..., None], flight: _Flight) -> None:
    """Waits for steps and commands in their order, while the next one is already being queued."""
    while (one := asked.get()) is not None:
        number, future, is_command = one
        try:
            message: Any = future.result()
        except BaseException as error:
            message = Failure.from_error(error)
        try:
            send(*((OfCommand(number), message) if is_command else ((number, message),)))
        except OSError:
            return  # the parent is gone
        except Exception as error:  # an answer that cannot be pickled
            send((number, Failure.from_error(error)))
        flight.answered()
