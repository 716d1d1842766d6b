"""Runs Gluon kernels of warps that fetch and warps that multiply on the CPU, as Triton's interpreter does for Triton's.

Each kind of warps is a thread of Python, whose values are whole tiles. What layouts say about the threads of a card is
left out. Copies, barriers and products of tiles have the order that the card may give them: a product reads its shared
memory when it is waited for, and a copy that was not waited for leaves NaN or another step's numbers to be read. A
kernel whose warps wait for each other for good fails.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import triton.experimental.gluon.language as gl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from outrider.kernels.gpu.launch.triton_kernel import TritonKernel

PATIENCE = 20.0  # seconds for which a warp waits at a barrier
_here = threading.local()  # program: its numbers; grid: how many there are


@dataclass(frozen=True)
class Pointer:
    """Places in a tensor."""

    memory: torch.Tensor  # flat
    place: Any = 0

    @property
    def dtype(self) -> Any:
        return types.SimpleNamespace(element_ty=self.memory.dtype)

    def __add__(self, distance: Any) -> Pointer:
        return Pointer(self.memory, self.place + distance)

    def places(self, mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
        place = torch.as_tensor(self.place)
        inside = torch.ones_like(place, dtype=torch.bool) if mask is None else mask.broadcast_to(place.shape)
        assert bool(((place >= 0) & (place < self.memory.numel()))[inside].all()), "outside of the tensor"
        return place, inside


def load(pointer: Pointer, mask: Any = None, other: float = 0.0, cache_modifier: str = "") -> torch.Tensor:
    place, inside = pointer.places(mask)
    read = pointer.memory[torch.where(inside, place, 0)]
    return torch.where(inside, read, torch.full_like(read, other))


def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    place, inside = pointer.places(mask)
    value = torch.as_tensor(value, dtype=pointer.memory.dtype).broadcast_to(place.shape)
    pointer.memory[place[inside]] = value[inside]


def atomic_add(pointer: Pointer, value: int, sem: str, scope: str) -> int:
    before = int(pointer.memory[pointer.place])
    pointer.memory[pointer.place] += value
    return before


class Shared:
    """A view of shared memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def index(self, at: Any) -> Any:
        assert 0 <= int(at) < self.tensor.shape[0]
        return Shared(self.tensor[int(at)])

    def slice(self, start: int, length: int, dim: int) -> Shared:
        return Shared(self.tensor.narrow(dim, start, length))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.tensor.permute(order))

    def load(self, layout: Any) -> torch.Tensor:
        return self.tensor.clone()

    def store(self, value: torch.Tensor) -> None:
        self.tensor.copy_(value)


@dataclass
class Barrier:
    """Arrivals and bytes for which a phase waits."""

    arrivals: int = 0
    arrived: int = 0
    missing_bytes: int = 0
    phase: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)

    def add(self, arrivals: int, num_bytes: int) -> None:
        with self.changed:
            self.arrived += arrivals
            self.missing_bytes += num_bytes
            assert self.arrived <= self.arrivals
            if self.arrived == self.arrivals and self.missing_bytes == 0:
                self.arrived, self.phase = 0, self.phase + 1
                self.changed.notify_all()

    def wait(self, phase: int) -> None:
        with self.changed:
            done = self.changed.wait_for(lambda: self.phase % 2 != int(phase), PATIENCE)
        assert done, "warps wait for each other"


class Barriers:
    def __init__(self, number: int) -> None:
        self.all = [Barrier() for _ in range(number)]

    def index(self, at: Any) -> Barrier:
        return self.all[int(at)]


def _init_barrier(barrier: Barrier, count: int) -> None:
    barrier.arrivals = count


def _copy(source: Any, place: list[Any], barrier: Barrier, target: Shared) -> None:
    """Rows and columns outside of the matrix become zeros. Bytes must be expected before they come."""
    (row, column), (rows, columns) = (int(start) for start in place), source.block_shape
    part = source.base[row : row + rows, column : column + columns]
    assert target.tensor.shape == (rows, columns) and target.dtype == part.dtype
    whole = torch.zeros(rows, columns, dtype=part.dtype)
    whole[: part.shape[0], : part.shape[1]] = part
    target.tensor.copy_(whole)
    barrier.add(0, -whole.numel() * whole.element_size())


class Product:
    """Products of tiles that have been started, and are carried out when they are waited for."""

    def __init__(self, left: Any, right: Shared, acc: Any, use_acc: Any) -> None:
        self.left, self.right, self.acc, self.use_acc = left, right, acc, use_acc

    def result(self) -> torch.Tensor:
        before = self.acc.result() if isinstance(self.acc, Product) else self.acc
        left = self.left.tensor if isinstance(self.left, Shared) else self.left
        made = left.float() @ self.right.tensor.float()
        return before + made if self.use_acc else made


def _multiply(left: Any, right: Shared, acc: Any, use_acc: Any = True, is_async: bool = False) -> Any:
    started = Product(left, right, acc, use_acc)
    return started if is_async else started.result()


def _wait(num_outstanding: int, deps: list[Any]) -> Any:
    assert num_outstanding == 0, "only products that are all waited for are known here"
    done = [each.result() if isinstance(each, Product) else each for each in deps]
    return done[0] if len(done) == 1 else tuple(done)


def _asm(code: Any, constraints: str, args: list[torch.Tensor], dtype: Any, is_pure: bool, pack: int) -> Any:
    text = str(getattr(code, "value", code))
    if "griddepcontrol" in text:
        return None
    if text.startswith("fma.rn.bf16x2"):
        a, b, c = (each.double() for each in args)
        return (a * b + c).to(torch.bfloat16)
    if text.startswith("mul.rn.bf16x2"):
        return (args[0].float() * args[1].float()).to(torch.bfloat16)
    if text.startswith("sub.rn.bf16x2"):
        return (args[0].float() - args[1].float()).to(torch.bfloat16)
    if isinstance(dtype, tuple):  # of int4 codes
        return tuple((part.int() - 8).to(torch.bfloat16) for part in (args[0] & 15, args[0] >> 4))
    assert args[0].dtype == torch.int8 and pack == 4, text
    return args[0].to(torch.bfloat16)


def _allocate(dtype: Any, shape: list[int], layout: Any) -> Any:
    if dtype == torch.int64:
        return Barriers(shape[0])
    return Shared(torch.full(shape, float("nan") if dtype.is_floating_point else 119, dtype=dtype))


Warps = tuple[Callable[..., None], tuple[Any, ...]]  # what a kind of warps runs


def _specialize(functions: list[Warps], num_warps: Any, registers: Any = None) -> None:
    program, grid, failed = _here.program, _here.grid, []

    def run(function: Callable[..., None], args: tuple[Any, ...]) -> None:
        _here.program, _here.grid = program, grid
        try:
            function(*args)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=each) for each in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def _nothing(*args: Any, **options: Any) -> None:
    pass


_LANGUAGE = types.SimpleNamespace(
    constexpr=gl.constexpr, float32=torch.float32, bfloat16=torch.bfloat16, int32=torch.int64, int64=torch.int64,
    uint32=torch.int64, load=load, store=store, atomic_add=atomic_add, static_range=range, minimum=min, exp=torch.exp,
    arange=lambda start, end, layout: torch.arange(start, end), cdiv=lambda a, b: -(-a // b),
    zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype), zeros_like=torch.zeros_like,
    program_id=lambda axis: torch.tensor(_here.program[axis]), num_programs=lambda axis: _here.grid[axis],
    convert_layout=lambda value, layout, assert_trivial=False: value, split=lambda value: value.unbind(-1),
    expand_dims=lambda value, axis: value.unsqueeze(axis), inline_asm_elementwise=_asm,
    allocate_shared_memory=_allocate, warp_specialize=_specialize, NVMMADistributedLayout=_nothing,
    DotOperandLayout=_nothing, BlockedLayout=_nothing, SliceLayout=_nothing, NVMMASharedLayout=_nothing,
    SwizzledSharedLayout=_nothing, DistributedLinearLayout=_nothing,
)
_REPLACED: dict[str, Any] = {
    "gl": _LANGUAGE, "barrier": _nothing, "fence_async_shared": _nothing, "warpgroup_mma": _multiply,
    "warpgroup_mma_wait": _wait, "mma_v2": lambda a, b, acc: acc + a.float() @ b.float(),
    "tma": types.SimpleNamespace(async_copy_global_to_shared=_copy),
    "mbarrier": types.SimpleNamespace(
        MBarrierLayout=_nothing, init=_init_barrier, wait=lambda barrier, phase: barrier.wait(phase),
        expect=lambda barrier, num_bytes: barrier.add(1, int(num_bytes)),
        arrive=lambda barrier, count: barrier.add(count, 0)),
    "slot_of": lambda turn, slots: int(turn) % slots, "phase_of": lambda turn, slots: int(turn) // slots & 1,
}
_functions: dict[Any, Callable[..., Any]] = {}


def _on_cpu(function: Any) -> Callable[..., Any]:
    """The Python function of a Gluon function, with the words of Gluon that it uses replaced."""
    if function not in _functions:
        names: dict[str, Any] = {}
        plain = function.fn
        _functions[function] = types.FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__)
        used = plain.__code__.co_names
        for name, value in plain.__globals__.items():
            names[name] = _translated(name, value) if name in used else value
    return _functions[function]


def _translated(name: str, value: Any) -> Any:
    if name in _REPLACED:
        return _REPLACED[name]
    if isinstance(value, GluonJITFunction):
        return _on_cpu(value)
    return value.value if isinstance(value, gl.constexpr) else value


@dataclass(frozen=True)
class _Matrix:
    """A matrix that the copy engine reads."""

    base: torch.Tensor
    block_shape: list[int]
    layout: Any

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype


def emulate(kernel: TritonKernel, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Runs a launch program by program."""
    names = kernel.function.arg_names
    given = dict(zip(names, args, strict=False)) | {name: value for name, value in options.items() if name in names}
    for name, value in given.items():
        if isinstance(value, torch.Tensor):
            size = value.untyped_storage().nbytes() // value.element_size() - value.storage_offset()
            given[name] = Pointer(value.as_strided((size,), (1,)))
        elif isinstance(value, TensorDescriptor):
            assert value.strides[1] == 1 and list(value.base.shape) == list(value.shape)
            given[name] = _Matrix(value.base, list(value.block_shape), value.layout)
    _here.grid = tuple(grid) + (1,) * (3 - len(grid))
    function = _on_cpu(kernel.function)
    for number in range(_here.grid[0] * _here.grid[1] * _here.grid[2]):
        rest, x = divmod(number, _here.grid[0])
        _here.program = (x, rest % _here.grid[1], rest // _here.grid[1])
        function(**given)
