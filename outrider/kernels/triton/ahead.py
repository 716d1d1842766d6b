"""Compiling kernels before they are needed, many at once: a compiler leaves other threads alone, so that a dozen take
hardly longer than one.

Inside `compiling_ahead` a kernel that makes nothing but floating-point numbers is compiled and not launched: what
follows computes with whatever the memory held. Kernels that make integers run as ever, since those are indices.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from triton.runtime.jit import JITFunction

THREADS = 12
DEFERRED = frozenset({
    "_combine_kernel", "_decode_kernel", "_delta_kernel", "_expert_kernel", "_gated_kernel", "_gated_norm_kernel",
    "_inputs_kernel", "_join_kernel", "_mamba2_kernel", "_matvec_kernel", "_merge_kernel", "_prefill_kernel",
    "_relu2_kernel", "_rms_norm_kernel", "_rope_cache_kernel", "_split_kernel", "_take_kernel", "_thin_kernel",
})  # fmt: skip


@contextmanager
def compiling_ahead() -> Iterator[None]:
    """Returns when everything is compiled. A kernel that the compiler refuses shows again when it is launched."""
    launch = JITFunction.run
    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="outrider-compile")
    compiling: dict[Any, Future[Any]] = {}

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if self.fn.__name__ not in DEFERRED:
            return launch(self, *args, grid=grid, warmup=warmup, **options)
        key = (self.fn.__name__, *map(_kind, args), *sorted((name, _kind(value)) for name, value in options.items()))
        if key not in compiling:
            compiling[key] = pool.submit(launch, self, *args, grid=grid, warmup=True, **options)
        return None

    JITFunction.run = run  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        JITFunction.run = launch  # type: ignore[method-assign]
        pool.shutdown(wait=True)


def _kind(value: Any) -> Any:
    """What of an argument decides which kernel it is, at most."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.data_ptr() % 16 == 0
    if isinstance(value, (tuple, list)):
        return tuple(map(_kind, value))
    return str(value)
