"""A pool of forks of this process that share a list of tasks, for tasks whose results lie outside of the forks.

A fork has everything that this process has, at once: nothing is imported again, which takes seconds, and nothing is
pickled. Forking is safe, threads and devices notwithstanding, for tasks that need neither: a fork frees nothing that it
did not make, prints nothing and leaves without cleaning up. A fork that hangs is ended; one that dies loses one task.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import partial
from io import FileIO

_INDEX_BYTES = 2
MAX_TASKS = 4096 // _INDEX_BYTES  # a pipe of any system holds as many indexes

Task = Callable[[], object]


def run_in_forks(tasks: Sequence[Task], num_forks: int, patience: float) -> Generator[int]:
    """Yields the index of each task when it is done or has raised. Ends early if all forks have died, or if none has
    finished a task for `patience` seconds. All forks are gone when this ends, or is closed."""
    assert len(tasks) <= MAX_TASKS
    forks: list[int] = []
    (todo, todo_end), (done, done_end) = _pipe(), _pipe()
    with todo, todo_end, done, done_end:
        todo_end.write(b"".join(index.to_bytes(_INDEX_BYTES, "big") for index in range(len(tasks))))
        todo_end.close()
        try:
            for _ in range(min(num_forks, len(tasks))):
                forks.append(_fork(partial(_run_tasks, tasks, todo, done, done_end)))
            done_end.close()
            num_left, poll = len(tasks), select.poll()
            poll.register(done, select.POLLIN)
            while num_left and poll.poll(1000 * patience) and (indexes := done.read(_INDEX_BYTES * MAX_TASKS)):
                for at in range(0, len(indexes), _INDEX_BYTES):
                    num_left -= 1
                    yield int.from_bytes(indexes[at : at + _INDEX_BYTES], "big")
        finally:
            for fork in forks:
                _end(fork)


class Fork:
    """One task in a fork of its own, from now on."""

    def __init__(self, task: Task) -> None:
        (todo, todo_end), (self._done, done_end) = _pipe(), _pipe()
        with todo, todo_end, done_end:
            todo_end.write(bytes(_INDEX_BYTES))
            todo_end.close()
            self._process = _fork(partial(_run_tasks, [task], todo, self._done, done_end))

    def wait(self, patience: float) -> None:
        """Until the task is done or has raised, the fork has died, or so many seconds have passed. It is gone then."""
        poll = select.poll()
        poll.register(self._done, select.POLLIN)
        poll.poll(1000 * patience)
        self._done.close()
        _end(self._process)


def _run_tasks(tasks: Sequence[Task], todo: FileIO, done: FileIO, done_end: FileIO) -> None:
    gc.disable()  # the collector might free memory of a device
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    done.close()  # with the parent gone nobody reads then: writing fails, and ends this fork
    with open(os.devnull, "w") as null, redirect_stdout(null), redirect_stderr(null):
        os.dup2(null.fileno(), 1)
        os.dup2(null.fileno(), 2)
        while index := todo.read(_INDEX_BYTES):  # one read: no other fork gets a part of the index
            with suppress(Exception):
                tasks[int.from_bytes(index, "big")]()
            done_end.write(index)


def _fork(run: Task) -> int:
    """Fork a process that runs the function, in a process group of its own with the processes that it starts. Returns
    its id."""
    parent = os.getpid()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about locks that threads hold
            fork = os.fork()
        if fork == 0:
            os.setpgid(0, 0)  # here and in the parent: whoever is first, nothing is started outside of the group
            run()
    finally:
        if os.getpid() != parent:
            os._exit(0)
    with suppress(OSError):
        os.setpgid(fork, fork)
    return fork


def _end(fork: int) -> None:
    with suppress(ProcessLookupError, ChildProcessError):
        if os.waitpid(fork, os.WNOHANG) == (0, 0):
            os.killpg(fork, signal.SIGKILL)
            os.waitpid(fork, 0)


def _pipe() -> tuple[FileIO, FileIO]:
    reader, writer = os.pipe()
    return FileIO(reader, "r"), FileIO(writer, "w")
