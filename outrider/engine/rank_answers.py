"""RankAnswers: collects the answers of all ranks to each step and command, and resolves their futures. No torch.

The consequence of the ranks' answers:

    a step that rank 0 has run                 its result
    a step that failed on every rank           its failure; the engine admits its requests anew, on every rank
    a step that failed on some ranks alone     the end of all ranks: the others wait for these in an all-reduce
    a command that every rank has carried out  the answers, combined
    a command that failed on some ranks alone  the end of all ranks: they hold different states from now on"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from outrider.core.ranks import RankLost
from outrider.engine.worker_messages import Failure
from outrider.runner.commands import Command
from outrider.runner.interface import WorkerDied


@dataclass
class _Asked:
    future: Future[Any]
    command: Command[Any] | None  # None: a step
    answers: dict[int, Any] = field(default_factory=dict)  # by rank
    first_failure: float | None = None  # when a rank failed

    @property
    def failures(self) -> dict[int, Failure]:
        return {rank: own for rank, own in self.answers.items() if isinstance(own, Failure)}


class RankAnswers:
    """Collects the answers of ranks to steps and commands. May be used by several threads."""

    def __init__(self, num_ranks: int, places: Sequence[str] = ()) -> None:
        """places: if there are several machines, a text for each rank that names its machine."""
        self._num_ranks = num_ranks
        self._names = [f"rank {rank}{place}" for rank, place in enumerate(places or [""] * num_ranks)]
        self._lock = threading.Lock()
        # By number: an interrupt may come between what is noted here and what is sent.
        self._asked: dict[int, _Asked] = {}

    def add(self, number: int, future: Future[Any], command: Command[Any] | None) -> None:
        with self._lock:
            self._asked[number] = _Asked(future, command)

    def drop(self, number: int) -> None:
        with self._lock:
            del self._asked[number]

    @property
    def has_steps(self) -> bool:
        """Whether a step waits for an answer."""
        with self._lock:
            return any(asked.command is None for asked in self._asked.values())

    @property
    def has_any(self) -> bool:
        return bool(self._asked)

    def take(self, rank: int, number: int, answer: Any) -> WorkerDied | None:
        """Note a rank's answer to the step or command of this number. Returns an error if the ranks cannot go on."""
        with self._lock:
            asked = self._asked.get(number)
            if asked is None:  # rank 0 has answered before
                assert isinstance(answer, Failure), "two answers to one step"
                return self._alone(rank, number, answer)
            asked.answers[rank] = answer
            failures, is_step = asked.failures, asked.command is None
            if failures and asked.first_failure is None:
                asked.first_failure = time.monotonic()
            if is_step and 0 < len(failures) < len(asked.answers):  # rank 0 has run it
                return self._alone_of(number, failures)
            if len(asked.answers) < self._num_ranks and (failures or not is_step):
                return None
            if failures and (len(failures) < self._num_ranks or _is_lost(failures)):
                return self._alone_of(number, failures)
            del self._asked[number]
        self._resolve(asked)
        return None

    def overdue(self, seconds: float) -> WorkerDied | None:
        """Return an error if some ranks failed at a step or command, and the others have not answered within `seconds`
        after that."""
        with self._lock:
            for number, asked in self._asked.items():
                if asked.first_failure is not None and time.monotonic() - asked.first_failure > seconds:
                    return self._alone_of(number, asked.failures)
        return None

    def fail_all(self, error: WorkerDied) -> None:
        with self._lock:
            futures = [asked.future for asked in self._asked.values()]
        for future in futures:
            fail(future, error)

    def _resolve(self, asked: _Asked) -> None:
        try:
            if asked.failures:
                raise asked.failures[0].to_error()
            answers = [asked.answers[rank] for rank in sorted(asked.answers)]
            asked.future.set_result(answers[0] if asked.command is None else asked.command.combine(answers))
        except BaseException as error:
            asked.future.set_exception(error)

    def _alone_of(self, number: int, failures: dict[int, Failure]) -> WorkerDied:
        """Make the error that names the first rank whose failure was not caused by the loss of another rank, or else
        the first rank that failed."""
        by_cause = sorted(failures.items(), key=lambda own: (issubclass(own[1].kind, RankLost), own[0]))
        return self._alone(by_cause[0][0], number, by_cause[0][1])

    def _alone(self, rank: int, number: int, failure: Failure) -> WorkerDied:
        error = WorkerDied(f"{self._names[rank]} failed in step or command {number}, and ranks cannot go on from "
                           f"there: {failure.kind.__name__}: {failure.message}")
        error.add_note(f"In the process of rank {rank}:\n{failure.trace}")
        return error


def fail(future: Future[Any], error: WorkerDied) -> None:
    with suppress(InvalidStateError):  # told already
        future.set_exception(error)


def _is_lost(failures: dict[int, Failure]) -> bool:
    return any(issubclass(own.kind, RankLost) for own in failures.values())
