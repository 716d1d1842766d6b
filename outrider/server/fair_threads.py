"""FairThreads: a thread pool in which one tenant's work does not delay another tenant's.

The server uses it where other programs use `asyncio.to_thread`: for reading large bodies, rendering chat templates and
tokenizing. A single template may take seconds, so in an ordinary pool one tenant could occupy all threads. Here a
tenant without running work always gets a thread. Otherwise the tenant with the least running work comes first."""

from __future__ import annotations

import os
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, NamedTuple

CURRENT_TENANT: ContextVar[str | None] = ContextVar("tenant", default=None)  # of the request being served
LEAST_THREADS = 4
MOST_TENANTS = 256  # whose work runs at once at least


class Job(NamedTuple):
    done: Future[Any]
    work: Callable[[], Any]


class FairThreads(ThreadPoolExecutor):
    """The pool of threads. `submit` reads the tenant from the caller's context variables."""

    def __init__(self, num_threads: int | None = None) -> None:
        self._num_threads = num_threads or max(LEAST_THREADS, (os.cpu_count() or 1) // 2)
        super().__init__(self._num_threads + MOST_TENANTS, thread_name_prefix="outrider-work")
        self._guard = threading.Lock()
        self._lines: dict[str | None, deque[Job]] = {}  # jobs that wait; none of them is empty
        self._running: Counter[str | None] = Counter()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        job = Job(Future(), lambda: fn(*args, **kwargs))
        with self._guard:
            self._lines.setdefault(CURRENT_TENANT.get(), deque()).append(job)
            self._start_jobs()
        return job.done

    def _start_jobs(self) -> None:
        """Start jobs in free threads; called with the lock held."""
        while self._lines:
            tenant = min(self._lines, key=lambda each: self._running[each])
            if self._running[tenant] and self._running.total() >= self._num_threads:
                return
            line = self._lines[tenant]
            job = line.popleft()
            if not line:
                del self._lines[tenant]
            self._running[tenant] += 1
            try:
                super().submit(self._run, tenant, job)
            except RuntimeError:  # shut down
                self._running[tenant] -= 1
                job.done.cancel()

    def _run(self, tenant: str | None, job: Job) -> None:
        try:
            if job.done.set_running_or_notify_cancel():
                try:
                    result = job.work()
                except BaseException as error:
                    job.done.set_exception(error)
                else:
                    job.done.set_result(result)
        finally:
            with self._guard:
                self._running[tenant] -= 1
                if not self._running[tenant]:
                    del self._running[tenant]
                self._start_jobs()
