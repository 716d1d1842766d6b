"""CheckThreads: threads that check the grammars of requests. Each client has a fixed number of threads, and its other
checks wait in a queue."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from outrider.features.grammars.turns import MOST_WAITING

MOST_THREADS = MOST_WAITING + 64  # of a client: most of them wait, for a turn or for an equal form of another request
T = TypeVar("T")


class CheckThreads:
    """Runs grammar checks in a limited number of threads for each client, so that one client cannot delay the others. A
    check mostly waits for the compile process, so in a shared pool one client's checks would occupy every thread. May
    be used by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: Counter[str] = Counter()  # threads by client
        self._lines: dict[str, deque[Callable[[], None]]] = {}  # none of them is empty

    def start(self, check: Callable[[], T], client: str) -> Future[T]:
        done: Future[T] = Future()
        job = partial(_answer, done, check)
        with self._lock:
            if self._running[client] >= MOST_THREADS:
                self._lines.setdefault(client, deque()).append(job)
                return done
            self._running[client] += 1
        try:
            threading.Thread(target=self._work, args=(client, job), name="outrider-grammar-check", daemon=True).start()
        except BaseException:  # the system gives no more threads
            with self._lock:
                self._end(client)
            raise
        return done

    def _work(self, client: str, job: Callable[[], None] | None) -> None:
        while job is not None:
            job()
            job = self._next(client)

    def _next(self, client: str) -> Callable[[], None] | None:
        """Return the next check for one of the client's threads. None tells the thread to end."""
        with self._lock:
            if line := self._lines.get(client):
                job = line.popleft()
                if not line:
                    del self._lines[client]
                return job
            self._end(client)
            return None

    def _end(self, client: str) -> None:
        """Note that a thread of the client has ended. Called with the lock held."""
        self._running[client] -= 1
        if not self._running[client]:
            del self._running[client]


def _answer(done: Future[Any], check: Callable[[], Any]) -> None:
    if not done.set_running_or_notify_cancel():
        return
    try:
        done.set_result(check())
    except BaseException as error:
        done.set_exception(error)
