"""How the host launches our kernels: `@kernel` in place of `@triton.jit`, then `name[grid](...)` as with Triton.

Every launch passes here, so that a thread can have its launches collected in place of being carried out
(`precompile.py`). Functions that only other kernels call stay with `@triton.jit`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import triton

# Takes a Triton function with the arguments and the options of a launch.
Collector = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
_collector: ContextVar[Collector | None] = ContextVar("collector", default=None)


class TritonKernel:
    """A kernel that the host launches. `function` is what Triton made of it."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        collect = _collector.get()
        if collect is None:
            launch: Callable[..., Any] = self.function[grid]
            return launch
        return lambda *args, **options: collect(self.function, args, options)


def kernel(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Takes the options of `triton.jit`, with which it may be called or not."""
    if function is None:
        return lambda function: kernel(function, **options)
    return TritonKernel(triton.jit(function, **options))


def is_collecting() -> bool:
    """Whether launches of this thread are collected. A wrapper that chooses among kernels then launches all of them."""
    return _collector.get() is not None


@contextmanager
def collecting(collect: Collector) -> Iterator[None]:
    """Within this context launches of this thread go to the collector, and nothing runs."""
    before = _collector.set(collect)
    try:
        yield
    finally:
        _collector.reset(before)
