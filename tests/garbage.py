"""Garbage collections in test processes. These hold the modules of all tests: to look through them takes a third of a
second, and every engine does so when it starts, to leave what lives out of later collections until it ends.

Here what lives before a test, or when an engine starts, stays out of collections when the engine has ended, too: each
looks at what was made since. Everything is looked at now and then.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

TESTS_BETWEEN = 100
unfreeze = gc.unfreeze
_tests = count(1)


@contextmanager
def collections_paused() -> Iterator[None]:
    """While tests are imported there is no garbage."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def freeze_before_test() -> None:
    gc.unfreeze = _stay_frozen
    if next(_tests) % TESTS_BETWEEN == 0:
        unfreeze()
        gc.collect()
    gc.freeze()


def _stay_frozen() -> None:
    """What an engine calls when it ends."""
