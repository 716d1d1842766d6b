"""Compiles kernels before they are needed, many at once. This file knows neither the kernels nor their callers.

Triton's front end holds the GIL, and threads alone keep fewer than two cores busy. So forks compile into Triton's cache
on disk (a fresh process would import for seconds), and this process loads from there. They begin while launches are
still being collected, and go on when all are known: a launch waits for its own kernel alone. Forking is safe here since
compiling asks no device: the driver that forks see has been asked in advance. What forks do not compile, threads of
this process do.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from threading import RLock
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.kernels.compiler_start import start_compiler
from outrider.kernels.fork_pool import ForkPool
from outrider.kernels.triton.asked_driver import asking_no_device
from outrider.kernels.triton.launch import TritonKernel, argument_class, awaiting, collecting
from triton import knobs
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import JITFunction, build, driver
from triton.runtime.cache import FileCacheManager

MAX_WORKERS = int(os.environ.get("OUTRIDER_COMPILE_THREADS", 16))
SECONDS = {"_settle_kernel": 2.0, "_output_kernel": 2.0, "_inputs_kernel": 1.8, "_add_kernel": 1.8,  # as measured
           "_decode_kernel": 1.8, "_packed_kernel": 2.4, "_mamba2_kernel": 1.8, "_score_filtered_kernel": 1.7,
           "_pick_filtered_kernel": 1.5, "_edit_kernel": 1.1, "_score_kernel": 1.1, "_latent_attention_kernel": 3.0,
           "_few_rows_kernel": 0.5}
MIN_KERNELS = 4  # with fewer to compile, forking does not pay
PATIENCE = 60.0  # seconds without a kernel from any fork

_ATEN = torch.ops.aten
_unfinished: list[_Compilation] = []  # at most one


@contextmanager
def compiling_ahead(workers: int | None = None) -> Iterator[None]:
    """Within this context launches of this thread are collected, not carried out, and their kernels begun to be
    compiled. Later a launch waits for its kernel; `finish_compiling` waits for all.

    Tensors that are made empty inside are zeros, as no kernel fills them: zero is a valid index wherever one is needed,
    since row, page and token 0 always exist. A kernel that the compiler refuses is refused again when it is launched.
    workers: processes, one for each core by default; 1: this process alone, in which all are compiled at the end of
    this context.
    """
    finish_compiling()
    compilation = _Compilation(min(MAX_WORKERS, _num_cores()) if workers is None else workers)
    starting = start_compiler()

    def collect(function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        compilation.add(function, args, options)
        if not starting.is_alive():
            compilation.begin()

    try:
        with collecting(collect), _ZerosForEmpty():
            yield
    except BaseException:
        compilation.close()
        raise
    finally:
        starting.join()
    compilation.begin()
    compilation.end()
    if compilation.has_forks:
        _unfinished.append(compilation)
        awaiting(compilation.wait_for)
    elif compilation.has_work:
        compilation.finish()


def is_compiling() -> bool:
    """Whether forks still compile; the caller may do other work meanwhile."""
    return any(compilation.is_busy() for compilation in _unfinished)


def finish_compiling() -> None:
    """Wait until every kernel of `compiling_ahead` is compiled and loaded."""
    while _unfinished:
        compilation = _unfinished.pop()
        try:
            compilation.finish()
        finally:
            awaiting(None)


class _ZerosForEmpty(TorchDispatchMode):
    """Within this mode empty tensors of this thread are zeros, since no kernel fills them. It is asked at operations
    alone: a TorchFunctionMode is asked for every shape, too, and wrappers of kernels look at twenty for each tensor."""

    _EMPTY = frozenset((_ATEN.empty.memory_format, _ATEN.empty_like.default, _ATEN.empty_strided.default,
                        _ATEN.new_empty.default, _ATEN.new_empty_strided.default))  # fmt: skip

    def _run(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in self._EMPTY else made


# Not in the class: torch hides what it finds there from its own compiler, which it imports for that, for seconds.
_ZerosForEmpty.__torch_dispatch__ = _ZerosForEmpty._run


@dataclass(frozen=True)
class _Launch:
    """A launch, by the properties that the compiler looks at. Launches that share all of these are one."""

    function: Any
    args: tuple[Any, ...]
    options: dict[str, Any]

    @classmethod
    def of(cls, function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> _Launch:
        return cls(function, tuple(map(_stand_in, args)), {name: _stand_in(value) for name, value in options.items()})

    def load(self) -> Any:
        """The kernel, which is compiled if it is not on disk."""
        return self.function.warmup(*self.args, grid=(1,), **self.options)

    def compile(self) -> None:
        """Compiles or loads the kernel, and its launcher, which Triton 3.6 compiles too."""
        kernel = self.load()
        with suppress(Exception):  # it is raised again by the launch
            driver.active.launcher_cls(kernel.src, kernel.metadata)

    def pickled(self) -> bytes | None:
        """For a fork; None if it could not find the kernel or the arguments there."""
        name = (self.function.fn.__module__, self.function.__name__)
        with suppress(Exception):
            if _find(*name) is self.function:
                return pickle.dumps((name, self.function.cache_key, self.args, self.options))
        return None


@dataclass(frozen=True)
class _Pointer:
    """A tensor's properties that the compiler looks at. The tensor itself would keep its memory until all kernels are
    compiled."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address


def _find(module: str, name: str) -> Any:
    found = getattr(import_module(module), name)
    return found.function if isinstance(found, TritonKernel) else found


def _compile_pickled(task: bytes) -> None:
    """Runs in a fork. A function's key depends on which others Triton has met before, so the parent's key is used,
    under which the parent will look for the kernel."""
    name, key, args, options = pickle.loads(task)
    function = _find(*name)
    function.hash = key
    if knobs.build.impl is None:
        knobs.build.impl = _build_launcher
    _Launch(function, args, options).compile()


def _build_launcher(name: str, src: str, srcdir: str, library_dirs: list[str], include_dirs: list[str],
                    libraries: list[str]) -> str:
    """Builds in a third of the time what Triton would build with -O3: a launcher takes its arguments apart once."""
    with knobs.build.scope():
        knobs.build.impl = None
        path: str = build._build(name, src, srcdir, library_dirs, include_dirs, libraries, ["-O0"])
    return path


class _Compilation:
    """Kernels on their way: collected, given to forks, loaded here. What no fork compiles is compiled here."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._uses_disk = not knobs.compilation.always_compile
        self._seen: set[Any] = set()  # keys of launches
        self._new: dict[Any, _Launch] = {}  # not looked at yet, by key
        self._kernels: dict[Any, str | None] = {}  # of launches, by key; None: it was on disk
        self._missing: dict[str, list[_Launch]] = {}  # those that forks may get, by kernel
        self._numbers: dict[str | None, int] = {}  # of tasks that forks got, by kernel
        self._given: dict[int, list[_Launch]] = {}  # to forks, by number of the task
        self._compiled: list[list[_Launch]] = []  # by forks, and not loaded yet
        self._here: list[list[_Launch]] = []  # to be compiled by this process
        self._forks: ForkPool | None = None
        self._lock = RLock()

    @property
    def has_forks(self) -> bool:
        return self._forks is not None

    @property
    def has_work(self) -> bool:
        return bool(self._missing or self._here or self._given or self._compiled)

    def add(self, function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        key = _key(function, args, options)
        if key not in self._seen:
            self._seen.add(key)
            self._new[key] = _Launch.of(function, args, options)

    def begin(self) -> None:
        """Load what is on disk, and begin to compile the rest. The longest first, of those that are known: none of them
        should begin when all others end."""
        new, self._new = sorted(self._new.items(), key=lambda item: _expected_size(item[1]), reverse=True), {}
        if not self._uses_disk:
            self._here += [[launch] for _, launch in new]
            return
        for key, launch in new:
            kernel = self._kernels[key] = _missing_on_disk(launch)
            number = self._numbers.get(kernel)
            if number in self._given:
                self._given[number].append(launch)
            elif kernel is not None:
                self._missing.setdefault(kernel, []).append(launch)
                self._give()

    def end(self) -> None:
        """All launches are known."""
        if self._forks is not None:
            self._forks.end()

    def _give(self) -> None:
        """Give forks what is missing, at once, since the first kernels are the longest."""
        if self._forks is None and self._workers > 1 and len(self._missing) >= MIN_KERNELS:
            try:
                with asking_no_device():
                    self._forks = ForkPool(_compile_pickled, self._workers)
            except OSError:
                self._workers = 1
        forks = self._forks
        if forks is None:
            return
        missing, self._missing = self._missing, {}
        for kernel, same in missing.items():
            task = same[0].pickled()
            if task is None:
                self._here.append(same)
            else:
                number = self._numbers[kernel] = forks.give(task)
                self._given[number] = same

    def wait_for(self, function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Wait until no fork compiles this launch's kernel any more: not those of other sizes, which captures may need
        last of all. The launch then loads the kernel."""
        key = _key(function, args, options)
        with self._lock:
            if key not in self._kernels:  # perhaps another launch's kernel serves this one
                self._kernels[key] = _missing_on_disk(_Launch.of(function, args, options))
            number = self._numbers.get(self._kernels[key])
            while self._forks is not None and number in self._given:
                self._receive(self._forks)

    def is_busy(self) -> bool:
        with self._lock:
            if self._forks is not None:
                self._take(self._forks.wait(0))
            return self._forks is not None and bool(self._given)

    def _receive(self, forks: ForkPool) -> None:
        """Wait for forks, and load what they have compiled meanwhile."""
        while not (numbers := forks.wait(0)) and self._compiled:
            _compile_all(self._compiled.pop())
        numbers = numbers or forks.wait(PATIENCE)
        self._take(numbers)
        if not numbers:
            self.close()

    def _take(self, numbers: list[int]) -> None:
        self._compiled += [self._given.pop(number) for number in numbers]

    def finish(self) -> None:
        with self._lock, asking_no_device(), ThreadPoolExecutor(max(1, self._workers)) as pool:
            self._here += self._missing.values()
            while True:
                for same in (*self._here, *self._compiled):
                    pool.submit(_compile_all, same)
                self._here, self._compiled = [], []
                if self._forks is None:
                    break
                if self._forks is not None:
                    self._receive(self._forks)

    def close(self) -> None:
        """End all forks. What they have not compiled is left to this process."""
        if self._forks is not None:
            self._forks.close()
            self._forks = None
        self._here += self._given.values()
        self._given = {}


def _key(function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """Launches with the same key have the same kernel."""
    named = sorted((name, _specialization(value)) for name, value in options.items())
    return (id(function), *_classes(function, args), *named)


def _classes(function: Any, args: tuple[Any, ...]) -> Iterator[Any]:
    """Yields the class of each argument. Arguments that the compiler tells apart have different ones."""
    for param, value in zip(function.params, args, strict=False):
        try:
            yield str(value) if param.is_constexpr else argument_class(value)
        except TypeError:
            yield _specialization(value)


def _expected_size(launch: _Launch) -> tuple[float, int]:
    """How many seconds it takes to compile, about: as measured, or as most do. What is written in Gluon takes long."""
    usual = 3.0 if isinstance(launch.function, GluonJITFunction) else 0.5
    return SECONDS.get(launch.function.__name__, usual), _source_size(launch.function)


@cache
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
        with suppress(Exception):  # it is raised again by the launch
            launch.compile()


class _Missing(Exception):
    """A kernel is not on disk; the argument is the kernel's name there."""


def _missing_on_disk(launch: _Launch) -> str | None:
    """None if the launch's kernel is on disk, and now loaded; else what tells the kernel from others. A kernel that the
    compiler refuses is like none other: it is refused again when it is launched."""

    class Reader(knobs.cache.manager_class or FileCacheManager):  # type: ignore[misc]
        def __init__(self, key: str, *args: Any, **options: Any) -> None:
            super().__init__(key, *args, **options)
            self.kernel = key

        def get_group(self, filename: str) -> Any:
            group = super().get_group(filename)
            if filename not in (group or ()):
                raise _Missing(self.kernel)  # here the compiler would begin
            return group

    with knobs.cache.scope():
        knobs.cache.manager_class = Reader
        try:
            launch.load()  # a fork may still be busy with the launcher
        except _Missing as kernel:
            return str(kernel)
        except Exception:
            return f"refused {id(launch)}"
    return None


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


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
    """Returns an argument that the compiler takes for this one, and that holds no tensor."""
    if isinstance(value, TensorDescriptor):
        return replace(value, base=_stand_in(value.base))
    if isinstance(value, tuple):
        parts = map(_stand_in, value)
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return _Pointer(value.dtype, value.data_ptr() % 16) if isinstance(value, torch.Tensor) else value
