"""Compiles many kernels at once before they are needed.

Triton's front end holds the GIL, so threads alone keep fewer than two cores busy. Therefore forks compile into Triton's
cache on disk (a fresh process would import for seconds), and this process loads the kernels from there. Forks begin
while launches are still being collected, and continue afterwards: a launch waits only for its own kernel. Kernels that
are not needed at first are compiled last (`postponing`), and start-up does not wait for them. Forking is safe here
because compiling asks no device: forks see a driver with recorded answers. Kernels that forks do not compile are
compiled by threads of this process."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from threading import RLock
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs
from triton.runtime.cache import FileCacheManager

from outrider.kernels.compiler_start import start_compiler
from outrider.kernels.fork_pool import ForkPool
from outrider.kernels.gpu.launch.asked_driver import asking_no_device
from outrider.kernels.gpu.launch.collected import CollectedLaunch, compile_pickled, expected_size, launch_key
from outrider.kernels.gpu.launch.triton_kernel import awaiting, collecting

MAX_WORKERS = int(os.environ.get("OUTRIDER_COMPILE_THREADS", 16))
MIN_KERNELS = 4  # with fewer to compile, forking does not pay
PATIENCE = 60.0  # seconds without a kernel from any fork

_ATEN = torch.ops.aten
_unfinished: list[_Compilation] = []  # at most one
_postpones = ContextVar("postpones", default=False)


@contextmanager
def compiling_ahead(workers: int | None = None) -> Iterator[None]:
    """A context in which launches of this thread are collected instead of carried out, and their kernels begin to be
    compiled. A later launch waits for its kernel; `finish_compiling` waits for all.

    Tensors allocated as empty inside are zeroed, because no kernel fills them. Zero is valid wherever an index is
    needed, since row, page and token 0 always exist. A kernel that the compiler rejects is rejected again when it is
    launched. workers: number of processes, by default one for each core. With 1, this process compiles everything at
    the end of the context.
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


@contextmanager
def postponing() -> Iterator[None]:
    """A context within `compiling_ahead`. Kernels launched in it are compiled after all others. The caller must work
    without them until `has_postponed` returns False."""
    token = _postpones.set(True)
    try:
        yield
    finally:
        _postpones.reset(token)


def is_compiling() -> bool:
    """Whether forks are still compiling kernels that were not postponed. The caller can do other work meanwhile."""
    return any(compilation.is_busy() for compilation in _unfinished)


def has_postponed() -> bool:
    """Whether postponed kernels are still being compiled. When all of them are compiled, this call also loads them."""
    for compilation in _unfinished[:]:
        compilation.is_busy()
        if not compilation.has_given:
            finish_compiling()
    return bool(_unfinished)


def finish_compiling(*, postponed: bool = True) -> None:
    """Wait until every kernel of `compiling_ahead` is compiled and loaded. postponed: wait for those of `postponing`
    too."""
    for compilation in _unfinished[:]:
        try:
            compilation.finish(postponed=postponed)
        finally:
            if not compilation.has_forks:
                _unfinished.remove(compilation)
                awaiting(None)


class _ZerosForEmpty(TorchDispatchMode):
    """A mode in which this thread's empty tensors are zeroed, because no kernel fills them. It intercepts only
    operations. A TorchFunctionMode would also intercept every access to a shape, of which wrappers of kernels make
    twenty per tensor."""

    _EMPTY = frozenset((_ATEN.empty.memory_format, _ATEN.empty_like.default, _ATEN.empty_strided.default,
                        _ATEN.new_empty.default, _ATEN.new_empty_strided.default))

    def _run(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in self._EMPTY else made


# Not in the class: torch hides what it finds there from its own compiler, which it imports for that, for seconds.
_ZerosForEmpty.__torch_dispatch__ = _ZerosForEmpty._run


class _Compilation:
    """The kernels that one `compiling_ahead` compiles: launches are collected, given to forks, and the kernels loaded
    here. Kernels that no fork compiles are compiled in this process."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._uses_disk = not knobs.compilation.always_compile
        self._seen: set[Any] = set()  # keys of launches
        self._new: dict[Any, CollectedLaunch] = {}  # not looked at yet, by key
        self._last: dict[Any, CollectedLaunch] = {}  # the same, postponed
        self._kernels: dict[Any, str | None] = {}  # of launches, by key; None: it was on disk
        self._missing: dict[str, list[CollectedLaunch]] = {}  # those that forks may get, by kernel
        self._numbers: dict[str | None, int] = {}  # of tasks that forks got, by kernel
        self._given: dict[int, list[CollectedLaunch]] = {}  # to forks, by number of the task
        self._first_postponed: float = math.inf  # the first such number
        self._compiled: list[list[CollectedLaunch]] = []  # by forks, and not loaded yet
        self._here: list[list[CollectedLaunch]] = []  # to be compiled by this process
        self._forks: ForkPool | None = None
        self._lock = RLock()

    @property
    def has_forks(self) -> bool:
        return self._forks is not None

    @property
    def has_given(self) -> bool:
        return bool(self._given)

    @property
    def has_work(self) -> bool:
        return bool(self._missing or self._here or self._given or self._compiled)

    def add(self, function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        key = launch_key(function, args, options)
        if key not in self._seen:
            self._seen.add(key)
            (self._last if _postpones.get() else self._new)[key] = CollectedLaunch.of(function, args, options)

    def begin(self) -> None:
        """Load the kernels that are on disk, and begin to compile the others. Kernels known to take longest come first,
        so that none of them is still being compiled when all others are done."""
        new, self._new = sorted(self._new.items(), key=lambda item: expected_size(item[1]), reverse=True), {}
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
        """Stop collecting launches, and begin to compile the postponed kernels."""
        self._new, self._last = self._last, {}
        if self._forks is not None:
            self._first_postponed = self._forks.num_given
        elif not self._missing:
            self._first_postponed = 0
        self.begin()
        if self._forks is not None:
            self._forks.end()

    def _give(self) -> None:
        """Give all missing kernels to forks now, in their order: those that take longest to compile come first."""
        if self._forks is None and self._workers > 1 and len(self._missing) >= MIN_KERNELS:
            try:
                with asking_no_device():
                    self._forks = ForkPool(compile_pickled, self._workers)
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
        """Wait while a fork compiles this launch's kernel; the launch then loads it. This does not wait for the same
        function compiled for other sizes, which may be needed much later."""
        key = launch_key(function, args, options)
        with self._lock:
            if key not in self._kernels:  # perhaps another launch's kernel serves this one
                self._kernels[key] = _missing_on_disk(CollectedLaunch.of(function, args, options))
            number = self._numbers.get(self._kernels[key])
            while self._forks is not None and number in self._given:
                self._receive(self._forks)

    def is_busy(self) -> bool:
        with self._lock:
            if self._forks is not None:
                self._take(self._forks.wait(0))
            return self._forks is not None and self._is_awaited(postponed=False)

    def _is_awaited(self, *, postponed: bool) -> bool:
        return bool(self._given) and (postponed or min(self._given) < self._first_postponed)

    def _receive(self, forks: ForkPool) -> None:
        """Wait for forks to finish tasks, and load kernels that they have compiled."""
        while not (numbers := forks.wait(0)) and self._compiled:
            _compile_all(self._compiled.pop())
        numbers = numbers or forks.wait(PATIENCE)
        self._take(numbers)
        if not numbers:
            self.close()

    def _take(self, numbers: list[int]) -> None:
        self._compiled += [self._given.pop(number) for number in numbers]

    def finish(self, *, postponed: bool = True) -> None:
        with self._lock, asking_no_device(), ThreadPoolExecutor(max(1, self._workers)) as pool:
            self._here += self._missing.values()
            self._missing = {}
            while True:
                for same in (*self._here, *self._compiled):
                    pool.submit(_compile_all, same)
                self._here, self._compiled = [], []
                if self._forks is None or (self._given and not self._is_awaited(postponed=postponed)):
                    break
                self._receive(self._forks)

    def close(self) -> None:
        """End all forks. This process will compile what they have not."""
        if self._forks is not None:
            self._forks.close()
            self._forks = None
        self._here += self._given.values()
        self._given = {}


def _compile_all(launches: list[CollectedLaunch]) -> None:
    for launch in launches:
        with suppress(Exception):  # it is raised again by the launch
            launch.compile()


class _Missing(Exception):
    """Raised in place of compiling: the kernel is not on disk. The argument is the kernel's name there."""


def _missing_on_disk(launch: CollectedLaunch) -> str | None:
    """Load the launch's kernel from disk and return None. If it is not there, return its name in Triton's cache. A
    kernel that the compiler rejects gets a unique name, and is rejected again when it is launched."""

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
