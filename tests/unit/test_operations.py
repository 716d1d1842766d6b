"""The table of operations: who carries out a call, and how a kernel from outside the package gets its turn."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from outrider.kernels import ops
from outrider.kernels.ops import Kernel, Operation, operation

CPU = torch.zeros(3)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test's own operations leave with it."""
    monkeypatch.setattr(operation, "_operations", dict(operation._operations))
    yield


def double(x: torch.Tensor, times: int = 1) -> torch.Tensor:
    """x, doubled some times."""
    return x * 2**times


def twin(name: str) -> object:
    return lambda x, times=1: (name, times)


def toy(kind: str, device_type: str = "cpu", **conditions: object) -> Kernel:
    return Kernel(kind, device_type, twin(kind), **conditions)  # type: ignore[arg-type]


@pytest.mark.usefixtures("table")
def test_the_first_kernel_that_serves_runs() -> None:
    few = toy("few", takes=lambda x, times=1: times < 3)
    op = Operation(double, toy("card", "cuda"), toy("narrow", dtypes=(torch.bfloat16,)), few,
                   toy("absent", is_available=lambda: False))
    assert op(CPU, 1) == ("few", 1) and op(CPU, times=2) == op(times=2, x=CPU) == ("few", 2)
    assert torch.equal(op(CPU + 1, 3), CPU + 8), "the reference"
    assert op(CPU.bfloat16(), 5) == ("narrow", 5)
    assert op.choose(CPU, 3) is double and op.choose(CPU, 1) is not double
    assert op.__doc__ == double.__doc__ and ops.operations()["double"] is op


@pytest.mark.usefixtures("table")
def test_a_kernel_from_outside_comes_first() -> None:
    op = Operation(double, toy("ours"))
    assert op(CPU) == ("ours", 1)
    op.add(toy("theirs", takes=lambda x, times=1: times == 2))
    assert op(CPU) == ("ours", 1) and op(CPU, 2) == ("theirs", 2)


@pytest.mark.usefixtures("table")
def test_a_kernel_is_imported_when_it_is_first_needed() -> None:
    op = Operation(double, Kernel("lazy", "cpu", "no.such.module:double", takes=None, dtypes=(torch.float64,)))
    assert torch.equal(op(CPU), CPU)
    with pytest.raises(ModuleNotFoundError):
        op(CPU.double())


@pytest.mark.usefixtures("table")
def test_another_argument_can_decide() -> None:
    op = Operation(lambda name, x: "reference", toy("ours", dtypes=(torch.int64,)), name="named",
                   subject=lambda name, x: x)
    assert op("a", CPU) == "reference"
    assert op("a", CPU.long())[0] == "ours"


@pytest.mark.usefixtures("table")
def test_names_are_unique() -> None:
    Operation(double)
    with pytest.raises(AssertionError, match="double"):
        Operation(double)


@pytest.mark.usefixtures("table")
def test_tests_choose_a_kind() -> None:
    one = Operation(double, toy("card", "cuda", is_available=lambda: False), toy("ours"))
    other = Operation(double, toy("ours"), name="other")
    with ops.using("card", one):
        assert one(CPU) == ("card", 1) and other(CPU) == ("ours", 1)
        with ops.using("reference"):
            assert torch.equal(one(CPU), CPU) and torch.equal(other(CPU), CPU)
        assert one(CPU) == ("card", 1) and other(CPU) == ("ours", 1)
    assert one(CPU) == ("ours", 1)
    with ops.using("card"):
        assert torch.equal(other(CPU), CPU), "it has no such kernel"
