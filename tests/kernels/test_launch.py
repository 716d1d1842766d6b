"""A launch goes to the kernel that Triton would choose for its arguments, without asking Triton again.

No card is needed: what Triton looks at in arguments is asked of Triton itself, and the kernels only note their calls.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")

import triton.experimental.gluon.language as gl
import triton.language as tl
from triton import knobs
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction, create_function_from_signature

from outrider.kernels.gpu.launch import triton_kernel as launch
from outrider.kernels.gpu.launch.triton_kernel import TritonKernel, argument_class

BACKEND = make_backend(GPUTarget("cuda", 90, 32))
STREAM = 77


class Pair(NamedTuple):
    first: Any
    second: Any


class OtherPair(NamedTuple):
    left: Any
    right: Any


def source(x, y, n, m, scale, LENGTH: tl.constexpr, FLAG: tl.constexpr = False):
    pass


class Card:
    device = 0

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return STREAM + device


class Compiled:
    """A compiled kernel as Triton returns it. Notes what it is called with."""

    def __init__(self, chosen: str) -> None:
        self.chosen, self.calls = chosen, []
        self.function, self.packed_metadata = object(), object()

    def run(self, *args: Any) -> None:
        self.calls.append(args)


class Function(JITFunction):  # type: ignore[misc]
    """Triton's choice of a kernel, without a compiler."""

    def __init__(self, fn: Any, **options: Any) -> None:
        super().__init__(fn, **options)
        self.bind = create_function_from_signature(self.signature, self.params, BACKEND)
        self.compiled: dict[str, Any] = {}
        self.asked = 0

    def choice(self, *args: Any, **options: Any) -> str:
        _, specialization, rest = self.bind(*args, **options)
        return f"{specialization} {rest}"

    def run(self, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        self.asked += 1
        chosen = self.choice(*args, **options)
        return self.compiled.setdefault(chosen, Compiled(chosen))


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    card = Card()
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=card))
    yield card


def tensor(dtype: torch.dtype, offset: int) -> torch.Tensor:
    """A tensor whose address is `offset` elements past a multiple of 16."""
    whole = torch.zeros(64, dtype=dtype)
    assert whole.data_ptr() % 16 == 0
    return whole[offset:]


DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.int32, torch.int8, torch.bool, torch.float64)
TENSORS = [tensor(dtype, offset) for dtype in DTYPES for offset in (0, 1, 2, 3, 4, 8, 16)]
EDGES = (0, 1, 15, 16, 17, 32, 2**31 - 16, 2**31 - 1, 2**31, 2**31 + 16, 2**32, 2**63 - 1, 2**63 - 16)
NUMBERS = [sign * edge for sign in (1, -1) for edge in EDGES] + [2**63, 2**64 - 16, 2**64 - 1, -(2**31), -(2**31) - 16]
DESCRIPTORS = [
    TensorDescriptor(torch.zeros(rows, 64, dtype=dtype), [rows, 64], [64, 1], [block, 64],
                     gl.NVMMASharedLayout(width, 16))
    for dtype in (torch.bfloat16, torch.float16) for rows in (64, 80) for block in (16, 64) for width in (64, 128)
]
OTHERS = [1.0, 0.0, 16.0, -1.0, 1e300, float("inf"), float("nan"), True, False, None]


def test_a_class_holds_only_what_triton_takes_for_the_same() -> None:
    numbers = [random.Random(seed).randrange(-(2**40), 2**40) for seed in range(200)]
    plain = [*TENSORS, *NUMBERS, *OTHERS, *DESCRIPTORS, *numbers]
    inside = [*TENSORS[:4], 0, 1, 16, 2**31, 1.0, True, None]
    tuples = [make(*pair) for make in (lambda *pair: pair, Pair, OtherPair) for pair in product(inside, repeat=2)]
    nested = [(pair, value) for pair in tuples[::7] for value in (1, 2, None)]
    for is_specialized, is_aligned in product((True, False), repeat=2):
        found: dict[Any, Any] = {}
        for value in (*plain, *tuples, *nested):
            seen = native_specialize_impl(BACKEND, value, False, is_specialized, is_aligned)
            key = type(value), argument_class(value)
            assert found.setdefault(key, seen) == seen, value
        assert len(found) < len(plain) + len(tuples) + len(nested), "values share classes"


@pytest.mark.parametrize("options", [{}, {"do_not_specialize": ["n"]}, {"do_not_specialize_on_alignment": ["x", "m"]}])
def test_a_launch_finds_the_kernel_that_triton_would_choose(card: Card, options: dict[str, Any]) -> None:
    function = Function(source, **options)
    kernel, draw = TritonKernel(function), random.Random(1)
    some = [*TENSORS[:16], *NUMBERS[:18], *OTHERS, *DESCRIPTORS, (1, TENSORS[0]), (16, TENSORS[1]), Pair(1, 3),
            OtherPair(1, 3)]
    launches = 1500
    for _ in range(launches):
        args: list[Any] = [draw.choice(TENSORS[:2]), TENSORS[7], 2, draw.choice(NUMBERS[:5]), 0.5]
        args[draw.randrange(5)] = draw.choice(some)
        named = {"LENGTH": draw.choice((16, "text")), "num_warps": draw.choice((4, 8))}
        named |= draw.choice(({}, {"FLAG": True}))
        asked, calls = function.asked, {name: len(compiled.calls) for name, compiled in function.compiled.items()}
        kernel[(3,)](*args, **named)
        ran = [name for name, compiled in function.compiled.items() if len(compiled.calls) > calls.get(name, 0)]
        assert ran == ([function.choice(*args, **named, **launch.OPTIONS)] if function.asked == asked else [])
    assert function.asked < launches * 0.8, "others were found"


def test_what_a_found_kernel_is_called_with(card: Card) -> None:
    function = Function(source)
    kernel, x, y = TritonKernel(function), tensor(torch.float32, 0), tensor(torch.int64, 1)
    pair = Pair(x, 7)
    kernel[(3,)](x, y, pair, 48, 0.5, LENGTH=64)
    (compiled,) = function.compiled.values()
    assert function.asked == 1 and compiled.calls == [], "Triton launched it"
    for grid, filled in (((3,), (3, 1, 1)), ((3, 4), (3, 4, 1)), ((3, 4, 5), (3, 4, 5)), ([6], (6, 1, 1))):
        kernel[grid](x, y, pair, 32, 1.5, LENGTH=64)
        called = compiled.calls.pop()
        assert called[:9] == (*filled, STREAM, compiled.function, compiled.packed_metadata, None, None, None)
        assert called[9:] == (x.data_ptr(), y.data_ptr(), pair, 32, 1.5, None, None)
    assert function.asked == 1
    for described in DESCRIPTORS[:2] * 2:  # the launcher describes the tensor to the card
        kernel[(3,)](x, described, pair, 32, 1.5, LENGTH=64)
    assert function.asked == 3
    assert [called[10] for each in function.compiled.values() for called in each.calls] == DESCRIPTORS[:2]


def test_devices_have_kernels_of_their_own(card: Card) -> None:
    function = Function(source)
    kernel, x = TritonKernel(function), tensor(torch.float32, 0)
    for card.device in (0, 1, 0, 1):
        kernel[(1,)](x, x, 2, 3, 0.5, LENGTH=64)
    assert function.asked == 2
    (compiled,) = function.compiled.values()
    assert [called[3] for called in compiled.calls] == [STREAM, STREAM + 1]


def test_what_triton_must_look_at_each_time(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    function = Function(source)
    kernel, x = TritonKernel(function), tensor(torch.float32, 0)
    args = x, x, 2, 3, 0.5

    def count(*args: Any, grid: Any = (1,), **named: Any) -> int:
        before = function.asked
        for _ in range(3):
            kernel[grid](*args, **named)
        return function.asked - before

    assert count(*args, LENGTH=64) == 1
    assert count(*args, grid=lambda bound: (bound["LENGTH"],), LENGTH=64) == 3, "a grid that needs the bound arguments"
    assert count(*args, 64) == 3, "a value that is compiled in, without its name"
    assert count(*args[:4], scale=0.5, LENGTH=64) == 3, "a value that is not, with its name"
    assert count(*args, LENGTH=[64]) == 3, "no hash"
    pointer = SimpleNamespace(dtype=torch.float32, data_ptr=lambda: 16)
    assert count(x, pointer, 2, 3, 0.5, LENGTH=64) == 3, "no class"
    assert count(x, (x, pointer), 2, 3, 0.5, LENGTH=64) == 3
    calls: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(knobs.runtime, "launch_enter_hook", calls.append)
        assert count(*args, LENGTH=64) == 3, "somebody wants to know of each launch"
    function.add_pre_run_hook(lambda *args, **named: None)
    assert count(*args, LENGTH=64) == 3
    function.pre_run_hooks.clear()
    assert count(*args, LENGTH=64) == 0


def test_what_cannot_be_called_is_not_remembered(card: Card) -> None:
    """Triton returns nothing where a hook keeps it from compiling, and a promise while it compiles."""
    function = Function(source)
    kernel, x = TritonKernel(function), tensor(torch.float32, 0)
    chosen = function.choice(x, x, 2, 3, 0.5, LENGTH=64, **launch.OPTIONS)
    function.compiled[chosen] = SimpleNamespace(result=lambda: None)
    for _ in range(3):
        kernel[(1,)](x, x, 2, 3, 0.5, LENGTH=64)
    assert function.asked == 3


def test_functions_that_are_interpreted_stay_with_triton() -> None:
    launched: list[Any] = []
    kernel = TritonKernel({(1,): lambda *args, **options: launched.append((args, options))})
    for _ in range(2):
        kernel[(1,)](5, SIZE=6)
    assert launched == [((5,), {"SIZE": 6} | launch.OPTIONS)] * 2
