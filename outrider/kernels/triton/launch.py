"""How the host launches our kernels: `@kernel` in place of `@triton.jit`, then `name[grid](...)` as with Triton.

Every launch passes here, so that a thread can have its launches collected in place of being carried out
(`precompile.py`), and so that a launch costs the host little. Functions that only other kernels call stay with
`@triton.jit`.

Triton finds the compiled kernel of a launch anew each time, by all that the compiler looks at in the arguments. Here
the kernel that it found is remembered by a key that tells apart at least as much, and the next launch with the same key
goes to the kernel itself. What has no key, and every first launch, goes through Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import NoneType
from typing import Any

import torch

import triton
from triton import knobs
from triton.runtime import JITFunction, driver

# Takes a Triton function with the arguments and the options of a launch.
Collector = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
_collector: ContextVar[Collector | None] = ContextVar("collector", default=None)


_TENSORS = (torch.Tensor, torch.nn.Parameter)
_BY_TYPE = (float, bool, NoneType)  # the compiler does not look at their values
_REST = ((1, 1, 1), (1, 1), (1,), ())  # of a grid, by the number of axes that it has


class TritonKernel:
    """A kernel that the host launches. `function` is what Triton made of it."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self._places: dict[tuple[type, ...], _Places | None] = {}  # by the types of the positional arguments
        self._found: dict[tuple[Any, ...], _Found] = {}

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        collect = _collector.get()
        if collect is None:
            return partial(self._launch, grid)
        return lambda *args, **options: collect(self.function, args, options)

    def _launch(self, grid: Any, *args: Any, **options: Any) -> None:
        types = tuple(map(type, args))
        try:
            places = self._places[types]
        except KeyError:
            places = self._places[types] = _Places.of(self.function, types)
        if places is None or callable(grid) or _has_hooks(self.function):
            self.function[grid](*args, **options)
            return
        active = driver.active
        device = active.get_current_device()
        try:
            key, values = places.key_of(args, [types, device, *options, *options.values()])
            found = self._found.get(key)
        except TypeError:  # something has no class, or no hash
            self.function[grid](*args, **options)
            return
        if found is None:
            self._remember(key, places, self.function[grid](*args, **options))
            return
        found.run(*grid, *_REST[len(grid)], active.get_current_stream(device), found.function, found.metadata,
                  None, None, None, *values, *found.constants)

    def _remember(self, key: tuple[Any, ...], places: _Places, kernel: Any) -> None:
        """kernel: what Triton returned after the launch, in any version that is called in the same way."""
        run, function, metadata = (getattr(kernel, name, None) for name in ("run", "function", "packed_metadata"))
        if run is not None and function is not None and metadata is not None:
            self._found[key] = _Found(run, function, metadata, (None,) * places.num_constants)


@dataclass(frozen=True)
class _Places:
    """Where tensors, integers and tuples are among positional arguments. What the compiler looks at in the others is
    their type."""

    tensors: tuple[int, ...]
    integers: tuple[int, ...]
    tuples: tuple[int, ...]
    num_constants: int  # values that are compiled in; they follow, by name

    @classmethod
    def of(cls, function: Any, types: tuple[type, ...]) -> _Places | None:
        """None if such a launch must go through Triton: under its interpreter, with descriptors of tensors, and where
        a value that is compiled in has no name, or one that is not has a name."""
        if not isinstance(function, JITFunction):
            return None
        are_constants = [param.is_constexpr for param in function.params]
        are_known = all(kind in (*_TENSORS, *_BY_TYPE, int) or issubclass(kind, tuple) for kind in types)
        if not are_known or any(are_constants[: len(types)]) or not all(are_constants[len(types) :]):
            return None
        tensors = tuple(index for index, kind in enumerate(types) if kind in _TENSORS)
        integers = tuple(index for index, kind in enumerate(types) if kind is int)
        tuples = tuple(index for index, kind in enumerate(types) if issubclass(kind, tuple))
        return cls(tensors, integers, tuples, len(are_constants) - len(types))

    def key_of(self, args: tuple[Any, ...], key: list[Any]) -> tuple[tuple[Any, ...], list[Any]]:
        """(the key, continued with all that the compiler may look at; the arguments, with addresses for tensors)."""
        values = list(args)
        for index in self.tensors:
            tensor = args[index]
            values[index] = address = tensor.data_ptr()
            key.append(tensor.dtype)
            key.append(address & 15 == 0)
        for index in self.integers:
            number = args[index]
            key.append(None if number == 1 else number >> 31 << 1 | (number & 15 == 0))
        for index in self.tuples:
            key.append(tuple(map(argument_class, args[index])))
        return tuple(key), values


@dataclass(frozen=True)
class _Found:
    """A compiled kernel on its device, and what it is called with."""

    run: Callable[..., Any]
    function: Any
    metadata: Any
    constants: tuple[None, ...]  # in place of the values that are compiled in


def argument_class(value: Any) -> Any:
    """Arguments with the same class are the same to the compiler. It looks at the dtype of a tensor and whether its
    address is a multiple of 16; whether a number is 1, is a multiple of 16, or takes 32 bits, 64, or 64 without a
    sign."""
    kind = type(value)
    if kind in _TENSORS:
        return value.dtype, value.data_ptr() & 15 == 0
    if kind is int:
        return None if value == 1 else value >> 31 << 1 | (value & 15 == 0)
    if issubclass(kind, tuple):
        return kind, *map(argument_class, value)
    if kind in _BY_TYPE:
        return kind
    raise TypeError(f"{kind.__name__} has no class: Triton must look at it")


def _has_hooks(function: Any) -> bool:
    """Whether somebody, a profiler say, is to be called with each launch. Triton does that."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave) or function.pre_run_hooks)


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
