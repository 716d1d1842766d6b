"""When kernels are compiled: ahead of their first launch, as far as a device's kernels are compiled at run time at all.

These functions do nothing on other devices, so callers need not ask for the device.
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
    """Whether postponed kernels are still missing. A launch of one of them waits for it."""
    return device.type == "cuda" and has_triton() and bool(import_module("outrider.kernels.gpu").has_postponed())


def finish_compiling(device: torch.device) -> None:
    """Wait until all kernels that `precompiling` has met and that are not postponed are compiled and loaded."""
    if device.type == "cuda" and has_triton():
        import_module("outrider.kernels.gpu").finish_compiling(postponed=False)


def is_compiling(device: torch.device) -> bool:
    """Whether other processes still compile kernels that `precompiling` has collected."""
    return device.type == "cuda" and has_triton() and bool(import_module("outrider.kernels.gpu").is_compiling())


def prepare_compiler(device: torch.device) -> None:
    """Imports Triton, then prepares its compiler and imports the kernels in threads of their own, so that the
    first compilation need not wait for that. Meanwhile weights can be loaded."""
    if device.type == "cuda" and find_spec("triton") is not None:
        with suppress(ImportError):
            import_module("triton")  # whole: of two threads that import it, one would find half of it
            start_compiler()
        Thread(target=has_triton, name="outrider-import-kernels", daemon=True).start()
