"""Compiles kernels before they are needed, many at once. This file knows neither the kernels nor their callers.

Triton's front end holds the GIL, and threads alone keep fewer than two cores busy. So forks compile into Triton's cache
on disk (a fresh process would import for seconds, and would have to be sent the kernels), and this process loads from
there. Forking is safe here since compiling asks no device: the driver that forks see has been asked in advance. What
forks do not compile, threads of this process do.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, zip_longest
from threading import Thread
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from outrider.kernels.fork_pool import MAX_TASKS, Fork, run_in_forks
from outrider.kernels.triton.launch import collecting
from triton import knobs
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import JITFunction, driver
from triton.runtime.cache import FileCacheManager, triton_key

MAX_WORKERS = int(os.environ.get("OUTRIDER_COMPILE_THREADS", 16))
EARLY_SHARE = 2  # one of so many workers may begin before all kernels are known
LONG = ("_latent_attention_kernel", "_choice_kernel")  # as measured; the name of one that is gone does no harm
MIN_KERNELS = 4  # with fewer to compile, forking does not pay
PATIENCE = 60.0  # seconds without a kernel from any fork


@lru_cache(maxsize=1)
def prepare_compiler() -> Thread:
    """Begins what compiling must wait for once: a hash of the compiler itself, which takes half a second."""
    hashing = Thread(target=triton_key, daemon=True)
    hashing.start()
    return hashing


@contextmanager
def compiling_ahead(workers: int | None = None) -> Iterator[None]:
    """Within this context launches of this thread are collected, not carried out. At its end they are compiled.

    Tensors that are made empty inside are zeros, as no kernel fills them: zero is a valid index wherever one is needed,
    since row, page and token 0 always exist. A kernel that the compiler refuses is refused again when it is launched.
    workers: processes, one for each core by default; 1: this process alone.
    """
    launches: dict[Any, _Launch] = {}
    workers = min(MAX_WORKERS, _num_cores()) if workers is None else workers
    early = _Early(workers // EARLY_SHARE if _uses_disk() else 0)

    def collect(function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        key = (id(function), *map(_specialization, args),
               *sorted((name, _specialization(value)) for name, value in options.items()))  # fmt: skip
        if key not in launches:
            named = {name: _stand_in(value) for name, value in options.items()}
            launches[key] = _Launch(function, tuple(map(_stand_in, args)), named)
            early.offer(launches[key])
        if not hashing.is_alive():
            early.begin()

    hashing = prepare_compiler()
    try:
        with collecting(collect), _ZerosForEmpty():
            yield
    except BaseException:
        early.stop()
        raise
    finally:
        hashing.join()
    if launches:
        early.begin()
        with _asking_no_device():
            _compile([launch for launch in launches.values() if launch not in early], workers, early)


class _ZerosForEmpty(TorchFunctionMode):
    """Within this mode empty tensors of this thread are zeros, since no kernel fills them."""

    _FILLED: dict[Any, Callable[..., Any]] = {
        torch.empty: torch.zeros, torch.empty_like: torch.zeros_like, torch.Tensor.new_empty: torch.Tensor.new_zeros,
    }  # fmt: skip

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._FILLED.get(func, func)(*args, **(kwargs or {}))


@dataclass(frozen=True)
class _Launch:
    """A launch, by the properties that the compiler looks at. Launches that share all of these are one."""

    function: Any
    args: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def is_long(self) -> bool:
        """Whether it takes seconds to compile, whatever its source says: what is written in Gluon does, and some."""
        return isinstance(self.function, GluonJITFunction) or self.function.__name__ in LONG

    @property
    def kernel(self) -> Any:
        """What most likely tells its kernel from others: constants and types."""
        types = (str(value.dtype) if isinstance(value, _Pointer) else _specialization(value) for value in self.args
                 if not isinstance(value, (int, float)))  # fmt: skip
        return id(self.function), *types, str(sorted(self.options.items()))

    def compile(self) -> None:
        """Compiles the kernel, or loads it if it is on disk; and its launcher, which Triton 3.6 compiles too."""
        kernel = self.function.warmup(*self.args, grid=(1,), **self.options)
        with suppress(Exception):  # it is raised again by the launch
            driver.active.launcher_cls(kernel.src, kernel.metadata)


@dataclass(frozen=True)
class _Pointer:
    """A tensor's properties that the compiler looks at. The tensor itself would keep its memory until all kernels are
    compiled."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address


class _Early:
    """Kernels that take longest to compile, each begun by a fork of its own while others are still being collected.
    There are few forks: this process must not wait for a core meanwhile."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._launches: dict[Any, list[_Launch]] = {}  # by kernel
        self._forks: list[Fork] = []

    def offer(self, launch: _Launch) -> None:
        if not launch.is_long:
            return
        kernel = launch.kernel
        if kernel in self._launches or len(self._launches) < self._most:
            self._launches.setdefault(kernel, []).append(launch)

    def begin(self) -> None:
        for same in list(self._launches.values())[len(self._forks) :]:
            with _asking_no_device(), suppress(OSError):
                self._forks.append(Fork(same[0].compile))

    def stop(self) -> None:
        for fork in self._forks:
            fork.wait(0)

    def __contains__(self, launch: _Launch) -> bool:
        return launch.is_long and launch.kernel in self._launches

    def finish(self) -> Iterator[list[_Launch]]:
        """The launches of each kernel when its fork is gone."""
        for fork, same in zip_longest(self._forks, self._launches.values()):
            if fork is not None:  # else there was none to be had
                fork.wait(PATIENCE)
            yield same


def _uses_disk() -> bool:
    return not knobs.compilation.always_compile


def _compile(launches: list[_Launch], workers: int, early: _Early) -> None:
    uses_disk = _uses_disk()
    kernels = _not_on_disk(launches) if uses_disk else [[launch] for launch in launches]
    # The longest first: none of them should begin when all others end.
    waiting = dict(enumerate(sorted(kernels, key=_expected_size, reverse=True)))
    with ThreadPoolExecutor(max(1, workers), thread_name_prefix="outrider-compile") as pool:
        if uses_disk and workers > 1 and len(waiting) >= MIN_KERNELS:
            tasks = [same[0].compile for same in waiting.values()][:MAX_TASKS]
            with suppress(OSError), closing(run_in_forks(tasks, workers, PATIENCE)) as compiled:
                for index in compiled:
                    pool.submit(_compile_all, waiting.pop(index))
        for same in chain(waiting.values(), early.finish()):
            pool.submit(_compile_all, same)


def _expected_size(same: list[_Launch]) -> tuple[bool, int]:
    return same[0].is_long, _source_size(same[0].function)


def _source_size(function: Any) -> int:
    """Characters of a kernel and of all functions that it calls."""
    seen: dict[int, int] = {}

    def visit(own: Any) -> None:
        seen[id(own)] = len(own.src)
        for name in own.fn.__code__.co_names:
            called = own.fn.__globals__.get(name)
            if isinstance(called, JITFunction) and id(called) not in seen:
                visit(called)

    visit(function)
    return sum(seen.values())


def _compile_all(launches: list[_Launch]) -> None:
    for launch in launches:
        launch.compile()


class _Missing(Exception):
    """A kernel is not on disk; the argument is the kernel's name there."""


def _not_on_disk(launches: list[_Launch]) -> list[list[_Launch]]:
    """Launches whose kernels must be compiled, in lists that share a kernel. Kernels on disk are loaded."""

    class Reader(knobs.cache.manager_class or FileCacheManager):  # type: ignore[misc]
        def __init__(self, key: str, *args: Any, **options: Any) -> None:
            super().__init__(key, *args, **options)
            self.kernel = key

        def get_group(self, filename: str) -> Any:
            group = super().get_group(filename)
            if filename not in (group or ()):
                raise _Missing(self.kernel)  # here the compiler would begin
            return group

    missing: dict[Any, list[_Launch]] = {}
    with knobs.cache.scope():
        knobs.cache.manager_class = Reader
        for index, launch in enumerate(launches):
            try:
                launch.compile()
            except _Missing as kernel:
                missing.setdefault(kernel.args, []).append(launch)
            except Exception:
                missing[index] = [launch]  # it is raised again by the launch
    return list(missing.values())


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


@dataclass(frozen=True)
class _AskedDriver:
    """A driver with answers, asked in advance, to the questions that compiling asks."""

    driver: Any
    device: int
    target: Any

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self.target

    def __getattr__(self, name: str) -> Any:
        return getattr(self.driver, name)


@contextmanager
def _asking_no_device() -> Iterator[None]:
    """A fork cannot ask the device, and a new thread would ask device 0."""
    active = driver.active
    driver.set_active(_AskedDriver(active, active.get_current_device(), active.get_current_target()))
    try:
        yield
    finally:
        driver.set_active(active)


def _specialization(value: Any) -> Any:
    """The most that the compiler may look at in an argument."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.data_ptr() % 16 == 0
    if isinstance(value, TensorDescriptor):
        return _specialization(value.base), tuple(value.block_shape), str(value.layout)
    if isinstance(value, (tuple, list)):
        return str(tuple(map(_specialization, value)))
    return str(value)


def _stand_in(value: Any) -> Any:
    if isinstance(value, TensorDescriptor):
        return replace(value, base=_stand_in(value.base))
    return _Pointer(value.dtype, value.data_ptr() % 16) if isinstance(value, torch.Tensor) else value
