"""Launches kernels from the host. A kernel is declared with `@kernel` in place of `@triton.jit`, and launched by
`name[grid](...)` as with Triton.

Every launch goes through this file, so that a thread's launches can be collected instead of carried out
(`precompile.py`), and so that a launch costs the host little. Functions that only other kernels call keep
`@triton.jit`.

For each launch Triton searches for the compiled kernel by everything that the compiler looks at in the arguments. This
file remembers the kernel that Triton found, under a key that distinguishes at least as much. The next launch with the
same key calls the kernel directly. A first launch, and a launch without a key, goes through Triton."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from threading import local
from types import NoneType
from typing import Any

import torch
import triton
from triton import knobs
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import JITFunction, driver

# Takes a Triton function with the arguments and the options of a launch.
Collector = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
_collector: ContextVar[Collector | None] = ContextVar("collector", default=None)
_wait_for: Collector | None = None  # see `awaiting`


_TENSORS = (torch.Tensor, torch.nn.Parameter)
_BY_TYPE = (float, bool, NoneType)  # the compiler does not look at their values
_BY_PARTS = (tuple, TensorDescriptor)
# Options of every launch. By default Triton emits an overflow check for every sum and product, and drops the checks
# again unless it debugs; this takes a fifth of the compiler's time in Python.
OPTIONS: dict[str, Any] = {} if knobs.runtime.debug else {"sanitize_overflow": False}
_REST = ((1, 1, 1), (1, 1), (1,), ())  # of a grid, by the number of axes that it has


@dataclass(frozen=True)
class _Product:
    """The matrix product that was launched last, whose input the next kernel may read early; see `note_product`."""

    stream: int
    x: torch.Tensor
    scratch: torch.Tensor


class _LastLaunch(local):
    product: _Product | None = None  # None unless the last kernel that this thread launched is one


_last = _LastLaunch()


class TritonKernel:
    """A kernel that the host launches. `function` is the object that triton.jit returned."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self._memories: dict[tuple[type, ...], _Memory | None] = {}  # by the types of the positional arguments

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        _last.product = None
        collect = _collector.get()
        if collect is None:
            return partial(self._launch, grid)
        return lambda *args, **options: collect(self.function, args, options | OPTIONS)

    def _launch(self, grid: Any, *args: Any, **options: Any) -> None:
        types = tuple(map(type, args))
        try:
            memory = self._memories[types]
        except KeyError:
            memory = self._memories[types] = _Memory.of(self.function, types)
        if memory is None or callable(grid) or _has_hooks(self.function):
            self._launch_by_triton(grid, args, options)
            return
        active = driver.active
        device = active.get_current_device()
        try:
            seen, values = memory.look_at(*args)
            key = (device, seen, *options, *options.values())
            found = memory.found.get(key)
        except TypeError:  # something has no class, or no hash
            self._launch_by_triton(grid, args, options)
            return
        if found is None:
            memory.remember(key, self._launch_by_triton(grid, args, options))
            return
        found.run(*grid, *_REST[len(grid)], active.get_current_stream(device), found.function, found.metadata,
                  None, None, None, *values, *memory.constants)

    def _launch_by_triton(self, grid: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Launch through Triton, and return the kernel that Triton found or compiled."""
        options = options | OPTIONS
        if _wait_for is not None:
            _wait_for(self.function, args, options)
        return self.function[grid](*args, **options)


@dataclass(frozen=True)
class _Found:
    """A compiled kernel on its device, with the data needed to launch it."""

    run: Callable[..., Any]
    function: Any
    metadata: Any


@dataclass(frozen=True)
class _Memory:
    """The compiled kernels found so far for launches whose positional arguments have the same types."""

    look_at: Callable[..., tuple[Any, tuple[Any, ...]]]  # see _looking_at
    constants: tuple[None, ...]  # in place of the values that are compiled in: those follow, by name
    found: dict[tuple[Any, ...], _Found] = field(default_factory=dict)

    @classmethod
    def of(cls, function: Any, types: tuple[type, ...]) -> _Memory | None:
        """Make the memory for arguments of these types. Returns None if such launches must go through Triton: under its
        interpreter, or unless exactly the compile-time arguments are given by name."""
        if not isinstance(function, JITFunction):
            return None
        are_constants = [param.is_constexpr for param in function.params]
        are_known = all(kind in (*_TENSORS, *_BY_TYPE, int) or issubclass(kind, _BY_PARTS) for kind in types)
        if not are_known or any(are_constants[: len(types)]) or not all(are_constants[len(types) :]):
            return None
        return cls(_looking_at(types), (None,) * (len(are_constants) - len(types)))

    def remember(self, key: tuple[Any, ...], kernel: Any) -> None:
        """Store a compiled kernel. kernel: what Triton returned after the launch; ignored if its version is launched
        differently."""
        run, function, metadata = (getattr(kernel, name, None) for name in ("run", "function", "packed_metadata"))
        if run is not None and function is not None and metadata is not None:
            self.found[key] = _Found(run, function, metadata)


def _looking_at(types: tuple[type, ...]) -> Callable[..., tuple[Any, tuple[Any, ...]]]:
    """Generate a function of arguments of these types that returns (their classes, as in `argument_class`; the
    arguments, with addresses in place of tensors). Like Triton's, its code is written for the types, because a loop
    over the arguments takes twice as long."""
    names = [f"a{index}" for index in range(len(types))]
    typed = list(zip(names, types, strict=True))
    tensors = [name for name, kind in typed if kind in _TENSORS]
    addresses = {name: f"p{name}" for name in tensors}
    seen = [f"{name}.dtype" for name in tensors]
    if tensors:  # nearly always all are aligned
        each = ", ".join(f"{address} & 15 == 0" for address in addresses.values())
        seen.append(f"({' | '.join(addresses.values())}) & 15 == 0 or ({each},)")
    seen += [_NUMBER_CLASS.format(name) for name, kind in typed if kind is int]
    seen += [f"argument_class({name})" for name, kind in typed if issubclass(kind, _BY_PARTS)]
    lines = [f"def look_at({', '.join(names)}):",
             *(f"    {address} = {name}.data_ptr()" for name, address in addresses.items()),
             f"    return ({''.join(f'{part}, ' for part in seen)}), "
             f"({''.join(f'{addresses.get(name, name)}, ' for name in names)})"]
    scope: dict[str, Any] = {"argument_class": argument_class}
    exec("\n".join(lines), scope)
    look_at: Callable[..., tuple[Any, tuple[Any, ...]]] = scope["look_at"]
    return look_at


_NUMBER_CLASS = "None if {0} == 1 else {0} >> 31 << 1 | ({0} & 15 == 0)"


def argument_class(value: Any) -> Any:
    """Return the class of an argument: the compiler makes no difference between arguments of one class. It looks at a
    tensor's dtype and whether its address is a multiple of 16; at whether a number is 1, is a multiple of 16, or takes
    32 bits, 64 bits, or 64 bits without a sign; and at the tiles of a tensor descriptor."""
    kind = type(value)
    if kind in _TENSORS:
        return value.dtype, value.data_ptr() & 15 == 0
    if kind is int:
        return None if value == 1 else value >> 31 << 1 | (value & 15 == 0)
    if issubclass(kind, tuple):
        return kind, *map(argument_class, value)
    if kind is TensorDescriptor:
        return kind, value.base.dtype, tuple(value.block_shape), str(value.layout)
    if kind in _BY_TYPE:
        return kind
    raise TypeError(f"{kind.__name__} has no class: Triton must look at it")


def _has_hooks(function: Any) -> bool:
    """Whether a hook (of a profiler, for example) is to run at each launch. Only a launch through Triton calls
    hooks."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave) or function.pre_run_hooks)


def kernel(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Make a `TritonKernel` of a function, in place of `triton.jit` and with its options. The decorator works with and
    without a call."""
    if function is None:
        return lambda function: kernel(function, **options)
    return TritonKernel(triton.jit(function, **options))


def awaiting(wait_for: Collector | None) -> None:
    """Make launches of kernels that are not compiled yet call `wait_for` first, because forks are about to compile
    them. It gets the same arguments as a collector. None ends this."""
    global _wait_for
    _wait_for = wait_for


def note_product(x: torch.Tensor, scratch: torch.Tensor) -> None:
    """Note that the kernel just launched is a product of x, and lets the next kernel start only when x is complete, so
    the next kernel need not wait for x. The product may still write `scratch` then. `scratch` is kept alive, so that
    memory that the next kernel's wrapper allocates cannot overlap it."""
    _last.product = _Product(_stream_of(x), x, scratch)


def is_behind_product(x: torch.Tensor) -> bool:
    """Whether this thread's next kernel directly follows a product of x that was given to `note_product`. Kernels that
    torch launches in between wait for the product, so they do no harm unless they write x."""
    product = _last.product
    return product is not None and product.x is x and product.stream == _stream_of(x)


def _stream_of(x: torch.Tensor) -> int:
    return driver.active.get_current_stream(x.device.index) if x.is_cuda else 0


def is_collecting() -> bool:
    """Whether this thread's launches are being collected. A wrapper that chooses among kernels then launches all of
    them."""
    return _collector.get() is not None


@contextmanager
def collecting(collect: Collector) -> Iterator[None]:
    """A context in which this thread's launches are passed to `collect`, and nothing runs."""
    before = _collector.set(collect)
    try:
        yield
    finally:
        _collector.reset(before)
