"""Python's garbage collector and a running engine.

A full collection looks at every container that lives. After start-up these are some hundred thousand of imported
libraries, which takes 80 to 140 ms: a stall of every request, once in a few hundred large steps.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager


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


def freeze_heap(owner: object) -> None:
    """Leave everything that lives now out of collections for as long as the owner lives. Collections go on, and look
    at what is made from now on."""
    gc.collect()
    gc.freeze()
    weakref.finalize(owner, gc.unfreeze).atexit = False
