"""Starts Triton's compiler early, in threads of its own: it has work to do once before it compiles anything.

It hashes itself, 400 MB, and it compiles, in C, what asks the driver: about half a second each. Importing all kernels
takes as long, so none of them is imported here.
"""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from threading import Thread


@lru_cache(maxsize=1)
def start_compiler() -> Thread:
    """The thread that ends when the compiler is ready. Triton must be there."""
    starting = Thread(target=_start, name="outrider-start-compiler", daemon=True)
    starting.start()
    return starting


def _start() -> None:
    from triton.runtime.cache import triton_key

    asking = Thread(target=_make_driver, daemon=True)
    asking.start()
    triton_key()
    asking.join()


def _make_driver() -> None:
    from triton.runtime import driver

    with suppress(Exception):  # whoever launches something will see it
        assert driver.active is not None
