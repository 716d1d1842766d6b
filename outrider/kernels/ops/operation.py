"""An operation of the table: a torch reference that defines it, and the kernels that may carry it out.

    rms_norm = Operation(
        reference.rms_norm,
        native_kernel("outrider.kernels.cpu:rms_norm", dtypes=FLOAT32),
        triton_kernel("outrider.kernels.gpu.elements.norm:rms_norm", dtypes=UP_TO_FLOAT32),
    )
    normed = rms_norm(x, weight, eps)     # has the signature of the reference, also for mypy

A call runs the first kernel that serves the device and the dtype of its *subject*, the first argument unless the row
says otherwise, and whose `takes` agrees to the arguments; the reference where none does. No other code chooses. Kernels
are imported at their first use. The column `exact` says how the operation keeps the promise of exact mode, in which a
token row's bits do not depend on the other token rows; callers ask `variant(exact)` for the operation to call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache, partial, update_wrapper
from importlib import import_module
from inspect import signature
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from outrider.core.lazy_exports import exported_names, import_attribute

P = ParamSpec("P")
R = TypeVar("R")

FLOAT32 = (torch.float32,)
BFLOAT16 = (torch.bfloat16,)
SIXTEEN_BITS = (torch.bfloat16, torch.float16)
UP_TO_FLOAT32 = (torch.float32, *SIXTEEN_BITS)
ANY_DTYPE: tuple[torch.dtype, ...] = ()
FP8_CAPABILITY = (8, 9)  # of the first GPUs with fp8

_Candidate = tuple[Callable[..., bool] | None, Callable[..., Any]]  # whether a kernel takes a call, and the kernel
_operations: dict[str, Operation[..., Any]] = {}


_planned: tuple[int, int] | None = None  # see `planning_for`


@contextmanager
def planning_for(capability: tuple[int, int] | None) -> Iterator[None]:
    """A context in which `Operation.serves_on` answers as on a machine that has a GPU of this compute capability. Plans
    for a GPU that is elsewhere are made in it; no kernel runs. None: as on this machine."""
    global _planned
    _planned, before = capability, _planned
    try:
        yield
    finally:
        _planned = before


def has_triton() -> bool:
    """Whether there is a GPU, and an installed Triton that compiles for it."""
    return _planned is not None or _finds_triton()


@lru_cache(maxsize=1)
def _finds_triton() -> bool:
    if not torch.cuda.is_available():
        return False
    try:
        import_module("outrider.kernels.gpu")
    except ImportError:
        return False
    return True


def has_fp8_triton() -> bool:
    """Whether there is a GPU that converts to fp8 and multiplies fp8 numbers."""
    return has_triton() and (_planned or torch.cuda.get_device_capability()) >= FP8_CAPABILITY


def has_native() -> bool:
    return bool(import_module("outrider.kernels.cpu").available())


class Exactness(Enum):
    """The reason why an operation is exact by itself, so that its result for a token row does not depend on other
    rows."""

    ROW_BY_ROW = "its kernels compute every token row alone, in one order of additions"
    NO_ARITHMETIC = "it moves floats, or computes integers"
    DRAFTS = "it computes drafts alone, which cannot change an output"


@dataclass(frozen=True)
class NotExact:
    """The reason why an operation has no exact variant. A model that needs the operation does not start in exact mode,
    and the error quotes the reason."""

    reason: str


@dataclass(frozen=True)
class Kernel:
    """One implementation of an operation, and the conditions under which it serves a call."""

    kind: str  # "native", "triton", or a name of your own
    device_type: str  # device type of the subject
    function: str | Callable[..., Any]  # "module:function" is imported when it is first needed
    dtypes: tuple[torch.dtype, ...] = ANY_DTYPE  # dtypes of the subject that it serves
    takes: str | Callable[..., bool] | None = None  # asked at every call, with the arguments of the call
    is_available: Callable[[], bool] = lambda: True  # asked once

    def load(self) -> _Candidate:
        return None if self.takes is None else _load(self.takes), _load(self.function)


def _load(function: str | Callable[..., Any]) -> Callable[..., Any]:
    return import_attribute(function) if isinstance(function, str) else function


UNDECLARED = NotExact("it declares no exact variant")
native_kernel = partial(Kernel, "native", "cpu", is_available=has_native)
triton_kernel = partial(Kernel, "triton", "cuda", is_available=has_triton)
fp8_kernel = partial(Kernel, "triton", "cuda", is_available=has_fp8_triton)


class Operation(Generic[P, R]):
    """One entry of the table, which is called like its reference. `subject` returns the tensor whose device and dtype
    decide which kernel runs, if that is not the first argument."""

    def __init__(self, reference: Callable[P, R], *kernels: Kernel, name: str = "",
                 subject: Callable[..., torch.Tensor] | None = None,
                 exact: Exactness | NotExact | Operation[P, R] | str = UNDECLARED) -> None:
        """exact: why the operation is exact, why it cannot be, or the operation that replaces it in exact mode. The
        replacement may be given as "module:operation", which is imported when it is first needed."""
        self.reference, self.kernels, self.subject, self._exact = reference, kernels, subject, exact
        self.name = name or reference.__name__
        assert self.name not in _operations, f"there is an operation {self.name} already"
        _operations[self.name] = self
        self._forced = ""  # the kind that `using` asks for
        self._candidates: dict[tuple[torch.device, torch.dtype], list[_Candidate]] = {}
        update_wrapper(self, reference)

    def __call__(self, *args: P.args, **options: P.kwargs) -> R:
        subject: Any = args[0] if args and self.subject is None else self._find_subject(*args, **options)
        candidates = self._candidates.get((subject.device, subject.dtype))
        if candidates is None:
            candidates = self._find_candidates(subject)
        for takes, run in candidates:
            if takes is None or takes(*args, **options):
                result: R = run(*args, **options)
                return result
        return self.reference(*args, **options)

    @property
    def exact(self) -> Exactness | NotExact | Operation[P, R]:
        found = self._exact
        if isinstance(found, str):
            replacement: Operation[P, R] = import_attribute(found)
            self._exact = found = replacement
        return found

    def variant(self, exact: bool) -> Operation[P, R]:
        """Return the operation to call in exact mode, or in ordinary mode. Callers ask once, when a model is
        prepared."""
        found = self.exact if exact else self
        if isinstance(found, NotExact):
            raise ValueError(f"exact=True: {self.name} has no exact form ({found.reason}): leave exact out for this "
                             "model")
        return self if isinstance(found, Exactness) else found

    def has_kernel(self, *args: P.args, **options: P.kwargs) -> bool:
        """Whether a call with these arguments would run a kernel, and not the reference."""
        return self.choose(*args, **options) is not self.reference

    def serves(self, subject: torch.Tensor) -> bool:
        """Whether there is a kernel for the device and dtype of `subject`. The kernel may set more conditions on each
        call."""
        return bool(self._find_candidates(subject))

    def serves_on(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether there is a kernel for this device and dtype. Allocates and loads nothing, so the device may be one
        that is only planned for."""
        return any(True for _ in self._serving(device, dtype))

    def choose(self, *args: P.args, **options: P.kwargs) -> Callable[P, R]:
        """Return the function that a call with these arguments would run."""
        subject = self._find_subject(*args, **options)
        taken = (run for takes, run in self._find_candidates(subject) if takes is None or takes(*args, **options))
        return next(taken, self.reference)

    def add(self, kernel: Kernel) -> None:
        """Add a kernel; it is tried before all kernels added earlier."""
        self.kernels = (kernel, *self.kernels)
        self._candidates.clear()

    def force(self, kind: str) -> None:
        """Run only kernels of this kind, or else the reference; see `using`."""
        self._forced = kind
        self._candidates.clear()

    def _find_subject(self, *args: Any, **options: Any) -> torch.Tensor:
        if self.subject is not None:
            return self.subject(*args, **options)
        first: torch.Tensor = args[0] if args else options[next(iter(signature(self.reference).parameters))]
        return first

    def _find_candidates(self, subject: torch.Tensor) -> list[_Candidate]:
        key = subject.device, subject.dtype
        if key not in self._candidates:
            self._candidates[key] = [kernel.load() for kernel in self._serving(*key)]
        return self._candidates[key]

    def _serving(self, device: torch.device, dtype: torch.dtype) -> Iterator[Kernel]:
        for kernel in self.kernels:
            is_forced = kernel.kind == self._forced
            is_placed = kernel.device_type == device.type and kernel.is_available() and not self._forced
            if (is_forced or is_placed) and (not kernel.dtypes or dtype in kernel.dtypes):
                yield kernel


def operations() -> dict[str, Operation[..., Any]]:
    """Return the table of operations, by name. Operations declared in other packages are in it once those are
    imported."""
    for module, _ in exported_names("outrider.kernels.ops").values():
        import_module(module)
    for operation in list(_operations.values()):
        _ = operation.exact  # imports the operation that replaces it
    return dict(_operations)


@contextmanager
def using(kind: str, *chosen: Operation[..., Any]) -> Iterator[None]:
    """Within this context these operations, or all, run kernels of one kind on any device, or their reference.

    For tests: Triton's kernels run on the CPU under its interpreter. Operations without this kind, and calls that
    it does not take, run the reference. Holds for all threads.
    """
    forced: Iterable[Operation[..., Any]] = chosen or tuple(operations().values())
    before = [(operation, operation._forced) for operation in forced]
    for operation, _ in before:
        operation.force(kind)
    try:
        yield
    finally:
        for operation, kind_before in before:
            operation.force(kind_before)
