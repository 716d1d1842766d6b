"""FormAnswers: forms that all ranks of a worker compile, and which ranks have done so. No torch."""

from __future__ import annotations

import threading
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from itertools import count

from outrider.engine.worker_messages import FormPrepared


@dataclass
class _Announced:
    done: Future[None]
    num_left: int  # ranks that have not answered
    error: str | None = None


class FormAnswers:
    """Counts the ranks' answers for each form. May be used by several threads."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._lock = threading.Lock()
        self._numbers = count()
        self._announced: dict[int, _Announced] = {}

    def add(self) -> tuple[int, Future[None]]:
        """A number for a new form, and a future that is done when every rank has answered. It fails with a ValueError
        if any rank could not compile the form."""
        done: Future[None] = Future()
        with self._lock:
            number = next(self._numbers)
            self._announced[number] = _Announced(done, self._num_ranks)
        return number, done

    def take(self, answer: FormPrepared) -> None:
        with self._lock:
            own = self._announced.get(answer.number)
            if own is None:
                return
            own.num_left -= 1
            own.error = own.error or answer.error
            if own.num_left:
                return
            del self._announced[answer.number]
        with suppress(InvalidStateError):  # given up
            if own.error is None:
                own.done.set_result(None)
            else:
                own.done.set_exception(ValueError(own.error))

    def fail_all(self, error: BaseException) -> None:
        """Fail all forms that wait, because the ranks have ended."""
        with self._lock:
            left, self._announced = list(self._announced.values()), {}
        for own in left:
            with suppress(InvalidStateError):
                own.done.set_exception(error)
