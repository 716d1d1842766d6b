"""Work that is shared out to forks of this process, for what it leaves behind outside of them. It knows no Triton.

A fork has everything that this process has, at once: nothing is imported again, which takes seconds, and nothing
pickled. It is safe, threads and devices notwithstanding, for work that needs neither: a fork frees nothing that it did
not make, says nothing and leaves without cleaning up. One that hangs is ended; one that dies takes a single work along.
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

_INDEX = 2  # bytes of a work's number
MOST = 4096 // _INDEX  # numbers that every pipe holds

Work = Callable[[], object]


def in_forks(works: Sequence[Work], num_forks: int, patience: float) -> Generator[int]:
    """Indexes of works, each when it is done or has raised. Ends early if the forks have died, or if none was through
    with anything for `patience` seconds. All forks are gone when it ends, or is closed."""
    assert len(works) <= MOST
    forks: list[int] = []
    (todo, todo_end), (done, done_end) = _pipe(), _pipe()
    with todo, todo_end, done, done_end:
        todo_end.write(b"".join(index.to_bytes(_INDEX, "big") for index in range(len(works))))
        todo_end.close()
        try:
            for _ in range(min(num_forks, len(works))):
                forks.append(_fork(partial(_run, works, todo, done, done_end)))
            done_end.close()
            left, poll = len(works), select.poll()
            poll.register(done, select.POLLIN)
            while left and poll.poll(1000 * patience) and (indexes := done.read(_INDEX * MOST)):
                for at in range(0, len(indexes), _INDEX):
                    left -= 1
                    yield int.from_bytes(indexes[at : at + _INDEX], "big")
        finally:
            for fork in forks:
                _end(fork)


def _run(works: Sequence[Work], todo: FileIO, done: FileIO, done_end: FileIO) -> None:
    gc.disable()  # what it would free may be a device's
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    done.close()  # so that writing fails, and ends this, where the parent is gone
    with open(os.devnull, "w") as null, redirect_stdout(null), redirect_stderr(null):
        os.dup2(null.fileno(), 1)
        os.dup2(null.fileno(), 2)
        while index := todo.read(_INDEX):  # as one read: no other fork gets a part of it
            with suppress(Exception):
                works[int.from_bytes(index, "big")]()
            done_end.write(index)


def _fork(run: Work) -> int:
    """The process that runs it, in a group of its own with those that it starts."""
    parent = os.getpid()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads whose locks nobody would release
            fork = os.fork()
        if fork == 0:
            os.setpgid(0, 0)  # on both sides: whoever comes first, nothing is started outside of the group
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
