"""Python's garbage collector and a running engine.

A full collection looks at every container that lives. After start-up these are some hundred thousand of imported
libraries, which takes 80 to 140 ms: a stall of every request, once in a few hundred large steps.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

_engines: set[int] = set()  # ids of the engines for which the heap is frozen


@contextmanager
def collections_paused() -> Iterator[None]:
    """Within, nothing is collected. Collections take a tenth of the time of importing torch, and find little."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def freeze_heap(engine: object) -> None:
    """Leave everything that lives now out of collections until all engines that froze the heap have ended. Collections
    go on, and look at what is made from now on."""
    gc.collect()
    gc.freeze()
    _engines.add(id(engine))
    weakref.finalize(engine, _release, id(engine)).atexit = False


def unfreeze_heap(engine: object) -> None:
    """The engine was closed. Python unfreezes the heap as a whole, so it stays frozen while another engine runs."""
    _release(id(engine))


def _release(engine_id: int) -> None:
    if engine_id in _engines:
        _engines.remove(engine_id)
        if not _engines:
            gc.unfreeze()
