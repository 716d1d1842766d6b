"""Compiling kernels before they are needed, many at once: a compiler leaves other threads alone, so that a dozen take
hardly longer than one.

Inside `compiling_ahead` kernels are compiled and not launched. What they would have made is zeros there: a valid index
wherever one is needed, since row, page and token 0 always exist.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from triton.runtime.jit import JITFunction

THREADS = int(os.environ.get("OUTRIDER_COMPILE_THREADS", min(12, os.cpu_count() or 1)))


@contextmanager
def compiling_ahead() -> Iterator[None]:
    """Returns when everything is compiled. A kernel that the compiler refuses shows again when it is launched."""
    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="outrider-compile")
    compiling: dict[Any, Future[Any]] = {}
    launch = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        key = (self.fn.__module__, self.fn.__name__, *map(_kind, args),
               *sorted((name, _kind(value)) for name, value in options.items()))  # fmt: skip
        if key not in compiling:
            compiling[key] = pool.submit(launch, self, *args, grid=grid, warmup=True, **options)

    JITFunction.run = run  # type: ignore[method-assign, assignment]
    try:
        with _zeros_for_empty():
            yield
    finally:
        JITFunction.run = launch  # type: ignore[method-assign]
        pool.shutdown(wait=True)


@contextmanager
def _zeros_for_empty() -> Iterator[None]:
    empty, empty_like = torch.empty, torch.empty_like
    torch.empty, torch.empty_like = torch.zeros, torch.zeros_like  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.empty, torch.empty_like = empty, empty_like


def _kind(value: Any) -> Any:
    """What of an argument decides which kernel it is, at most."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.data_ptr() % 16 == 0
    if isinstance(value, (tuple, list)):
        return str(tuple(map(_kind, value)))
    return str(value)
