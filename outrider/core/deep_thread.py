"""Runs a function in a thread with a deep stack and waits for it up to a time limit.

Code that follows thousands of nested rules overflows an ordinary stack, which would end the process. A thread cannot be
stopped: one that exceeds the limit goes on running, and only a few may run at a time.

Python stops all threads when it exits, and a thread inside a Rust library then crashes the process. So a command exits
by `end_process`, and other programs wait up to EXIT_SECONDS at their exit."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")
STACK_BYTES = 512 << 20  # address space of the stack: memory is taken as the stack grows
MOST_AT_ONCE = 4
EXIT_SECONDS = 10.0  # that the end of a program waits for functions which run

_free = threading.BoundedSemaphore(MOST_AT_ONCE)
_starting = threading.Lock()  # the size of stacks is a setting of the whole process
_running: set[threading.Thread] = set()


def run_deep(work: Callable[[], T], seconds: float) -> T:
    """Run `work` in a thread with a deep stack. Raises TimeoutError if it is not done in time, or could not begin."""
    deadline = time.monotonic() + seconds
    if not _free.acquire(timeout=seconds):
        raise TimeoutError
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)
        except BaseException as error:  # a library in Rust that has failed raises one of these
            done.set_exception(RuntimeError(str(error)))
        finally:
            _running.discard(threading.current_thread())
            _free.release()

    _start(run)
    return done.result(max(0.0, deadline - time.monotonic()))


def _start(run: Callable[[], None]) -> None:
    with _starting:
        before = threading.stack_size(STACK_BYTES)
        thread = threading.Thread(target=run, name="outrider-deep", daemon=True)
        _running.add(thread)
        try:
            thread.start()
        except BaseException:
            _running.discard(thread)
            _free.release()
            raise
        finally:
            threading.stack_size(before)


def end_process(status: int) -> None:
    """End the process at once if a function still runs in a deep thread, because the interpreter's normal exit would
    stop that thread in the middle."""
    if not _running:
        return
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(OSError):  # the disk of a log is full
                stream.flush()
    os._exit(status)


def _wait_for_running() -> None:
    deadline = time.monotonic() + EXIT_SECONDS
    for thread in list(_running):
        thread.join(max(0.0, deadline - time.monotonic()))


atexit.register(_wait_for_running)
