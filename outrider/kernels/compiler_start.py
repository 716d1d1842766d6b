"""Starts Triton's compiler early, in threads of its own: it has work to do once before it compiles anything.

It hashes itself, 400 MB, and it compiles, in C, what asks the driver: about half a second each. Importing all kernels
takes as long, so none of them is imported here. Hashing needs no torch: it can begin while torch is imported.
"""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from threading import Thread

_DRIVER = Path("/dev/nvidiactl")  # there if a GPU can be asked
_hashing: list[Thread] = []  # at most one


def hash_compiler_ahead(device: str = "auto") -> None:
    """Begin to hash the compiler, in a process that will load a model for this device and has not imported torch yet.
    Does nothing without a GPU or without Triton: the first compilation hashes then."""
    if device != "cpu" and not _hashing and _DRIVER.exists() and find_spec("triton") is not None:
        # No daemon: a process that ends while a library sets itself up would abort, so its end waits.
        _hashing.append(Thread(target=_hash, name="outrider-hash-compiler"))
        _hashing[0].start()


@lru_cache(maxsize=1)
def start_compiler() -> Thread:
    """Start a thread that ends when the compiler is ready. Triton must be there."""
    starting = Thread(target=_start, name="outrider-start-compiler", daemon=True)
    starting.start()
    return starting


def _start() -> None:
    asking = Thread(target=_make_driver, daemon=True)
    asking.start()
    _find_assembler()
    for ahead in _hashing:
        ahead.join()
    _hash()
    asking.join()


def _hash() -> None:
    with suppress(Exception):  # the first compilation raises it again
        from triton.runtime.cache import triton_key

        triton_key()


def _find_assembler() -> None:
    """Let Triton ask the assembler for its version, in a process. Triton remembers the answer."""
    with suppress(Exception):  # the first compilation raises it again
        from triton import knobs

        assert knobs.nvidia.ptxas is not None


def _make_driver() -> None:
    from triton.runtime import driver

    with suppress(Exception):  # the first launch raises it again
        assert driver.active is not None
