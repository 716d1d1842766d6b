"""A kernel launch that was collected instead of carried out: the properties by which the compiler tells launches apart,
and how the kernel is compiled, here or in a fork."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from typing import Any

import torch
from triton import knobs
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import JITFunction, build, driver

from outrider.kernels.gpu.launch.triton_kernel import TritonKernel, argument_class

# Seconds that kernels take to compile, as measured.
SECONDS = {"_settle_kernel": 2.0, "_output_kernel": 2.0, "_inputs_kernel": 1.8, "_add_kernel": 1.8,
           "_decode_kernel": 1.8, "_packed_kernel": 2.4, "_mamba2_kernel": 1.8, "_score_filtered_kernel": 1.7,
           "_pick_filtered_kernel": 1.5, "_edit_kernel": 1.1, "_score_kernel": 1.1, "_latent_attention_kernel": 3.0,
           "_few_rows_kernel": 0.5, "_delta_kernel": 6.0, "_prepare_kernel": 2.5}


@dataclass(frozen=True)
class CollectedLaunch:
    """A launch, reduced to the properties that the compiler looks at. Launches with equal properties share a kernel."""

    function: Any
    args: tuple[Any, ...]
    options: dict[str, Any]

    @classmethod
    def of(cls, function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> CollectedLaunch:
        return cls(function, tuple(map(stand_in, args)), {name: stand_in(value) for name, value in options.items()})

    def load(self) -> Any:
        """Return the kernel; it is compiled if it is not on disk."""
        return self.function.warmup(*self.args, grid=(1,), **self.options)

    def compile(self) -> None:
        """Compile or load the kernel, and its launcher, which Triton 3.6 compiles as well."""
        kernel = self.load()
        with suppress(Exception):  # it is raised again by the launch
            driver.active.launcher_cls(kernel.src, kernel.metadata)

    def pickled(self) -> bytes | None:
        """Return the launch as bytes for a fork; None if the fork could not find the kernel or unpickle the
        arguments."""
        name = (self.function.fn.__module__, self.function.__name__)
        with suppress(Exception):
            if _find(*name) is self.function:
                return pickle.dumps((name, self.function.cache_key, self.args, self.options))
        return None


@dataclass(frozen=True)
class _Pointer:
    """The properties of a tensor that the compiler looks at. Keeping the tensor would hold its memory until all kernels
    are compiled."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address


def _find(module: str, name: str) -> Any:
    found = getattr(import_module(module), name)
    return found.function if isinstance(found, TritonKernel) else found


def compile_pickled(task: bytes) -> None:
    """Compile a pickled launch; this runs in a fork. A function's key in Triton depends on which functions Triton has
    met before, so the fork uses the parent's key, under which the parent will look for the kernel."""
    name, key, args, options = pickle.loads(task)
    function = _find(*name)
    function.hash = key
    if knobs.build.impl is None:
        knobs.build.impl = _build_launcher
    CollectedLaunch(function, args, options).compile()


def _build_launcher(name: str, src: str, srcdir: str, library_dirs: list[str], include_dirs: list[str],
                    libraries: list[str]) -> str:
    """Build a launcher as Triton does, but without -O3, in a third of the time: a launcher only unpacks its
    arguments."""
    with knobs.build.scope():
        knobs.build.impl = None
        path: str = build._build(name, src, srcdir, library_dirs, include_dirs, libraries, ["-O0"])
    return path


def launch_key(function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """Return a key of a launch; launches with the same key have the same kernel."""
    named = sorted((name, specialization(value)) for name, value in options.items())
    return (id(function), *_classes(function, args), *named)


def _classes(function: Any, args: tuple[Any, ...]) -> Iterator[Any]:
    """Return the class of each argument, as `argument_class` does. Arguments that the compiler treats differently have
    different classes."""
    for param, value in zip(function.params, args, strict=False):
        try:
            yield str(value) if param.is_constexpr else argument_class(value)
        except TypeError:
            yield specialization(value)


def expected_size(launch: CollectedLaunch) -> tuple[float, int]:
    """Estimate how long a kernel takes to compile, as a key to sort by: (seconds, measured for this kernel or usual for
    its language; length of its source)."""
    usual = 3.0 if isinstance(launch.function, GluonJITFunction) else 0.5
    return SECONDS.get(launch.function.__name__, usual), source_size(launch.function)


@cache
def source_size(function: Any) -> int:
    """Count the characters of a kernel and of all functions that it calls."""
    seen: dict[int, int] = {}

    def visit(own: Any) -> None:
        seen[id(own)] = len(own.src)
        for name in own.fn.__code__.co_names:
            called = own.fn.__globals__.get(name)
            if isinstance(called, JITFunction) and id(called) not in seen:
                visit(called)

    visit(function)
    return sum(seen.values())


def specialization(value: Any) -> Any:
    """Return everything that the compiler may look at in an argument."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.data_ptr() % 16 == 0
    if isinstance(value, TensorDescriptor):
        return specialization(value.base), tuple(value.block_shape), str(value.layout)
    if isinstance(value, (tuple, list)):
        return str(tuple(map(specialization, value)))
    return str(value)


def stand_in(value: Any) -> Any:
    """Return an argument that is equal to this one for the compiler, but holds no tensor."""
    if isinstance(value, TensorDescriptor):
        return replace(value, base=stand_in(value.base))
    if isinstance(value, tuple):
        parts = map(stand_in, value)
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return _Pointer(value.dtype, value.data_ptr() % 16) if isinstance(value, torch.Tensor) else value
