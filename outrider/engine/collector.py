"""Keeps Python's garbage collector from stalling a running engine.

A full collection visits every live container object. After start-up these are some hundred thousand of imported
libraries, which takes 80 to 140 ms: a stall of every request, once in a few hundred large steps. The objects that exist
after start-up are therefore frozen. The objects of a few hundred requests also take 30 to 60 ms, and with so few older
objects Python runs full collections often. While an engine has work, only the young generation is collected."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

BUSY_THRESHOLDS = (10_000, 10, 1 << 30)  # a young collection takes a millisecond, and a full one never comes
LONGEST_BUSY = 300.0  # seconds without a full collection, after which a busy engine runs one
_engines: set[int] = set()  # ids of the engines for which the heap is frozen


@contextmanager
def collections_paused() -> Iterator[None]:
    """A context without garbage collections. While torch is imported, collections would take a tenth of the time and
    free little."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def freeze_heap(engine: object) -> None:
    """Exclude all objects that exist now from garbage collection, until every engine that froze the heap has ended.
    Later collections visit only newer objects."""
    gc.collect()
    gc.freeze()
    _engines.add(id(engine))
    weakref.finalize(engine, _release, id(engine)).atexit = False


def unfreeze_heap(engine: object) -> None:
    """Note that an engine was closed. Python unfreezes the heap as a whole, so it stays frozen while another engine
    runs."""
    _release(id(engine))


def _release(engine_id: int) -> None:
    if engine_id in _engines:
        _engines.remove(engine_id)
        if not _engines:
            gc.unfreeze()


class WorkingThresholds:
    """Sets the collector's thresholds: those for a busy engine while any engine of this process has work, and the
    user's at all other times."""

    def __init__(self) -> None:
        self._known: set[int] = set()  # ids of the engines that live
        self._working: set[int] = set()  # ids of those that have work
        self._before: tuple[int, int, int] | None = None  # the user's thresholds, while an engine has work
        self._due = 0.0  # when a full collection is due

    def begin(self, engine: object) -> None:
        """Set the thresholds for a busy engine. Called when an engine is about to run a step."""
        if not self._working:
            self._before = gc.get_threshold()
            if self._before[0]:  # else the user collects
                gc.set_threshold(*BUSY_THRESHOLDS)
            self._due = time.monotonic() + LONGEST_BUSY
        elif self._due < time.monotonic():
            self._due = time.monotonic() + LONGEST_BUSY
            if gc.isenabled() and self._before and self._before[0]:
                gc.collect()
        if id(engine) not in self._known:
            self._known.add(id(engine))
            weakref.finalize(engine, self._forget, id(engine)).atexit = False
        self._working.add(id(engine))

    def end(self, engine: object) -> None:
        """Restore the user's thresholds if no engine has work any more. Called when an engine has run out of work, or
        was closed."""
        self._end(id(engine))

    def _forget(self, engine_id: int) -> None:
        self._end(engine_id)
        self._known.discard(engine_id)

    def _end(self, engine_id: int) -> None:
        if engine_id in self._working:
            self._working.remove(engine_id)
            if not self._working and self._before is not None:
                if gc.get_threshold() == BUSY_THRESHOLDS:  # else the user has changed them meanwhile
                    gc.set_threshold(*self._before)
                self._before = None


working_thresholds = WorkingThresholds()
