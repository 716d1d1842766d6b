"""Compilation of kernels before their first launch, for devices whose kernels are compiled at run time.

On other devices these functions do nothing, so callers need not check the device.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext, suppress
from importlib import import_module
from importlib.util import find_spec
from threading import Thread

import torch

from outrider.kernels.compiler_start import start_compiler
from outrider.kernels.ops import has_triton


def precompiling(device: torch.device) -> AbstractContextManager[None]:
    """A context in which a launch on the device only begins to compile its kernel. Later launches wait for their
    kernels, and `finish_compiling` waits for all kernels. Does nothing on devices whose kernels are not compiled at run
    time."""
    if device.type != "cuda" or not has_triton():
        return nullcontext()
    ahead: AbstractContextManager[None] = import_module("outrider.kernels.gpu").compiling_ahead()
    return ahead


def postponing(device: torch.device) -> AbstractContextManager[None]:
    """A context within `precompiling`. Kernels launched in it are compiled after all other kernels, and
    `finish_compiling` does not wait for them."""
    if device.type != "cuda" or not has_triton():
        return nullcontext()
    postponed: AbstractContextManager[None] = import_module("outrider.kernels.gpu").postponing()
    return postponed


def has_postponed(device: torch.device) -> bool:
    """Whether some postponed kernels are not compiled yet. A launch of such a kernel waits until it is compiled."""
    return device.type == "cuda" and has_triton() and bool(import_module("outrider.kernels.gpu").has_postponed())


def finish_compiling(device: torch.device) -> None:
    """Wait until all kernels that were launched within `precompiling`, except postponed ones, are compiled and
    loaded."""
    if device.type == "cuda" and has_triton():
        import_module("outrider.kernels.gpu").finish_compiling(postponed=False)


def is_compiling(device: torch.device) -> bool:
    """Whether other processes are still compiling kernels that were launched within `precompiling`."""
    return device.type == "cuda" and has_triton() and bool(import_module("outrider.kernels.gpu").is_compiling())


def prepare_compiler(device: torch.device) -> None:
    """Import Triton, then prepare its compiler and import the kernels in background threads. The caller can load
    weights meanwhile, and the first compilation need not wait for these imports."""
    if device.type == "cuda" and find_spec("triton") is not None:
        with suppress(ImportError):
            import_module("triton")  # whole: of two threads that import it, one would find half of it
            start_compiler()
        Thread(target=has_triton, name="outrider-import-kernels", daemon=True).start()
