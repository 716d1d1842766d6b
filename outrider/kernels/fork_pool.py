"""A pool of forked processes that run tasks, for tasks whose results end up outside of the processes (in files).

A fork shares all memory of this process at once, so it need not import anything again, which takes seconds. Forking is
safe despite threads and devices if the tasks need neither: a fork frees nothing that it did not make, prints nothing
and exits without cleaning up. A fork that hangs is killed; a fork that dies loses one task.

This process forks only once, and that fork makes the others, since forking a process with much memory takes 10 to 20
ms.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import struct
import tempfile
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from io import FileIO
from types import TracebackType

_ORDER = struct.Struct("=IQI")  # a task's number, where it lies in the file of tasks, and its size
_NUMBER = struct.Struct("=I")
_AT_ONCE = 1024  # numbers read from a pipe at once
POLITENESS = 5  # by how much forks give way to this process where there are too few cores


class ForkPool:
    """Runs tasks in forked processes. A task is a bytes object that each fork passes to the same function. Tasks begin
    in the order in which they are given."""

    def __init__(self, run: Callable[[bytes], object], num_forks: int) -> None:
        self.num_given = 0
        self.num_done = 0
        self._run = run
        self._end = 0  # end of the file of tasks
        self._tasks = tempfile.TemporaryFile()
        (self._todo, self._todo_end), (self._done, self._done_end) = _pipe(), _pipe()
        try:
            self._first = self._fork(num_forks)
        finally:
            self._todo.close()
            self._done_end.close()
        self._poll = select.poll()
        self._poll.register(self._done, select.POLLIN)

    def give(self, task: bytes) -> int:
        """Add a task, and return its number."""
        os.pwrite(self._tasks.fileno(), task, self._end)
        number = self.num_given
        self._todo_end.write(_ORDER.pack(number, self._end, len(task)))  # whole, as pipes take so few bytes at once
        self._end += len(task)
        self.num_given += 1
        return number

    def end(self) -> None:
        """Tell the forks that no more tasks come. A fork then ends as soon as no task is left to begin, even if other
        forks are still busy."""
        self._todo_end.close()

    def wait(self, seconds: float) -> list[int]:
        """Return the numbers of the tasks that have ended, with a result or an error, since the last call. If there are
        none, wait for one. Returns nothing if none ends within the time, or all forks have died."""
        if self.num_done == self.num_given or not self._poll.poll(1000 * seconds):
            return []
        numbers = [number for (number,) in _NUMBER.iter_unpack(self._done.read(_NUMBER.size * _AT_ONCE) or b"")]
        self.num_done += len(numbers)
        return numbers

    def close(self) -> None:
        """Kill all forks and the processes that they have started, if tasks are left; idle forks exit by themselves."""
        for end in (self._todo_end, self._done, self._tasks):
            end.close()
        if self.num_done < self.num_given:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._first, signal.SIGKILL)  # not waited for before, so that no other process has its number
        with suppress(ChildProcessError):
            os.waitpid(self._first, 0)

    def __enter__(self) -> ForkPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        self.close()

    def _fork(self, num_forks: int) -> int:
        """Fork a process that forks the others. They form a process group, together with all processes that they start.
        Returns the id of the first fork, which is also the group's id."""
        first = _fork()
        if first == 0:
            try:
                os.setpgid(0, 0)  # here and in the parent, so that nothing is started outside of the group
                self._todo_end.close()
                self._done.close()  # when the parent has ended, writing fails, which ends a fork
                others = []
                for _ in range(num_forks - 1):
                    others.append(_fork())
                    if others[-1] == 0:
                        break
                self._work()
                if all(others):
                    for other in others:
                        os.waitpid(other, 0)
            finally:
                os._exit(0)
        with suppress(OSError):
            os.setpgid(first, first)
        return first

    def _work(self) -> None:
        gc.disable()  # the collector might free memory of a device
        with suppress(OSError):
            os.nice(POLITENESS)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        with open(os.devnull, "w") as null, redirect_stdout(null), redirect_stderr(null):
            os.dup2(null.fileno(), 1)
            os.dup2(null.fileno(), 2)
            while order := self._todo.read(_ORDER.size):  # one read: no other fork gets a part of the order
                task, start, size = _ORDER.unpack(order)
                with suppress(Exception):
                    self._run(os.pread(self._tasks.fileno(), size, start))
                self._done_end.write(_NUMBER.pack(task))


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about locks that threads hold
        return os.fork()


def _pipe() -> tuple[FileIO, FileIO]:
    reader, writer = os.pipe()
    return FileIO(reader, "r"), FileIO(writer, "w")
