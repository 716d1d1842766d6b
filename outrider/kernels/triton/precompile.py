"""Compiling kernels before they are needed, many at once. It knows neither the kernels nor who launches them.

Triton's front end holds the GIL, and threads alone keep fewer than two cores busy. So forks compile into Triton's cache
on disk (a fresh process would import for seconds, and would have to be sent the kernels), and this process loads from
there. Forking is safe here since compiling asks no device: the driver that it sees only remembers. What forks do not
bring about, threads do.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from threading import Thread
from typing import Any

import torch

from outrider.kernels.fork_pool import MOST, in_forks
from triton import knobs
from triton.runtime import driver
from triton.runtime.cache import FileCacheManager, triton_key
from triton.runtime.jit import JITFunction

WORKERS = int(os.environ.get("OUTRIDER_COMPILE_THREADS", 16))  # at most
FEWEST = 4  # kernels that are worth forking for
PATIENCE = 60.0  # seconds without a kernel from any fork


@contextmanager
def compiling_ahead(workers: int | None = None) -> Iterator[None]:
    """Inside, kernels are collected and not launched, and what they would have made is zeros: a valid index wherever
    one is needed, since row, page and token 0 always exist. When it returns, all of them are compiled. One that the
    compiler refuses shows again when it is launched. workers: processes, one for each core by default; 1: this one."""
    tasks: dict[Any, _Task] = {}
    launch = JITFunction.run

    def collect(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        key = (self.fn.__module__, self.fn.__name__, *map(_kind, args),
               *sorted((name, _kind(value)) for name, value in options.items()))  # fmt: skip
        if key not in tasks:
            named = {name: _stand_in(value) for name, value in options.items()}
            tasks[key] = _Task(self, tuple(map(_stand_in, args)), named)

    hashing = Thread(target=triton_key)  # a hash of the compiler itself: it takes half a second, once
    hashing.start()
    JITFunction.run = collect  # type: ignore[method-assign, assignment]
    try:
        with _zeros_for_empty():
            yield
    finally:
        JITFunction.run = launch  # type: ignore[method-assign]
        hashing.join()
    if tasks:
        with _asking_no_device():
            _compile(list(tasks.values()), min(WORKERS, _num_cores()) if workers is None else workers)


@dataclass(frozen=True)
class _Task:
    kernel: Any
    args: tuple[Any, ...]
    options: dict[str, Any]

    def compile(self) -> None:
        """Or loads it, if it is on disk; and so what launches it, which some versions of Triton compile too."""
        kernel = self.kernel.run(*self.args, grid=(1,), warmup=True, **self.options)
        with suppress(Exception):  # a launch would tell
            driver.active.launcher_cls(kernel.src, kernel.metadata)


@dataclass(frozen=True)
class _Pointer:
    """What the compiler sees of a tensor. The tensor itself would keep its memory until all kernels are compiled."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address


def _compile(tasks: list[_Task], workers: int) -> None:
    uses_disk = not knobs.compilation.always_compile
    kernels = _not_on_disk(tasks) if uses_disk else [[task] for task in tasks]
    # The longest first, by their source: none of them should begin when all others end.
    waiting = dict(enumerate(sorted(kernels, key=lambda same: -len(same[0].kernel.src))))
    with ThreadPoolExecutor(max(1, workers), thread_name_prefix="outrider-compile") as pool:
        if uses_disk and workers > 1 and len(waiting) >= FEWEST:
            works = [same[0].compile for same in waiting.values()][:MOST]
            with suppress(OSError), closing(in_forks(works, workers, PATIENCE)) as compiled:
                for index in compiled:
                    pool.submit(_compile_all, waiting.pop(index))
        for same in waiting.values():
            pool.submit(_compile_all, same)


def _compile_all(tasks: list[_Task]) -> None:
    for task in tasks:
        task.compile()


class _Missing(Exception):
    """Has what names a kernel on disk."""


def _not_on_disk(tasks: list[_Task]) -> list[list[_Task]]:
    """Those that have to be compiled, in lists of those that are one kernel. The others are loaded."""

    class Reader(knobs.cache.manager_class or FileCacheManager):  # type: ignore[misc]
        def __init__(self, key: str, *args: Any, **options: Any) -> None:
            super().__init__(key, *args, **options)
            self.kernel = key

        def get_group(self, filename: str) -> Any:
            group = super().get_group(filename)
            if filename not in (group or ()):
                raise _Missing(self.kernel)  # here the compiler would begin
            return group

    missing: dict[Any, list[_Task]] = {}
    with knobs.cache.scope():
        knobs.cache.manager_class = Reader
        for index, task in enumerate(tasks):
            try:
                task.compile()
            except _Missing as kernel:
                missing.setdefault(kernel.args, []).append(task)
            except Exception:
                missing[index] = [task]  # whatever is wrong with it, a launch will tell
    return list(missing.values())


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


@dataclass(frozen=True)
class _Remembered:
    """A driver that has been asked in advance what compiling asks."""

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
    """A fork cannot, and a new thread would ask device 0."""
    active = driver.active
    driver.set_active(_Remembered(active, active.get_current_device(), active.get_current_target()))
    try:
        yield
    finally:
        driver.set_active(active)


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


def _stand_in(value: Any) -> Any:
    return _Pointer(value.dtype, value.data_ptr() % 16) if isinstance(value, torch.Tensor) else value
