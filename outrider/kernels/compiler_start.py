"""Prepares Triton's compiler in background threads while the process starts.

Before its first compilation Triton hashes its own 400 MB and compiles, in C, its driver, which asks the device for its
properties: about half a second each. Importing all kernels takes as long, so this file imports none of them. Hashing
needs no torch and can begin while torch is imported.
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
    Does nothing without a GPU or without Triton; then the first compilation computes the hash."""
    if device != "cpu" and not _hashing and _DRIVER.exists() and find_spec("triton") is not None:
        # No daemon: a process that ends while a library sets itself up would abort, so its end waits.
        _hashing.append(Thread(target=_hash, name="outrider-hash-compiler"))
        _hashing[0].start()


@lru_cache(maxsize=1)
def start_compiler() -> Thread:
    """Start a thread that prepares the compiler and ends when it is ready. Triton must be installed."""
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
    """Have Triton run the assembler once, in a subprocess, to get its version, which Triton then remembers."""
    with suppress(Exception):  # the first compilation raises it again
        from triton import knobs

        assert knobs.nvidia.ptxas is not None


def _make_driver() -> None:
    from triton.runtime import driver

    with suppress(Exception):  # the first launch raises it again
        assert driver.active is not None
