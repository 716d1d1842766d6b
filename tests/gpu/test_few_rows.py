"""Hopper's kernel of products with few token rows on a card, against float64, with NaN in all that nobody may read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")

from outrider.kernels import ops, reference
from outrider.kernels.gpu.attention.merge import prepare_counters
from outrider.kernels.gpu.hopper.few_rows import (
    LARGE_RING_BYTES,
    RING_BYTES,
    few_rows_gated,
    few_rows_linear,
    is_fastest,
    make_plan,
    padded_rows,
)
from outrider.kernels.gpu.hopper.prefill import is_hopper

# Outputs, inner dimension, outputs of a tile, splits, bytes of the ring; for all numbers of token rows.
CASES = [(6144, 4096, 64, 1, LARGE_RING_BYTES), (4096, 14336, 64, 2, LARGE_RING_BYTES), (1000, 2048, 64, 4, RING_BYTES),
         (2560, 10240, 64, 3, LARGE_RING_BYTES), (28680, 1024, 128, 1, RING_BYTES)]
Product = Callable[[torch.Tensor, int], torch.Tensor]  # of token rows, and how many a tile has


def draw(*shape: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=generator)


def check(multiply: Product, wanted: Callable[[torch.Tensor], torch.Tensor], k: int) -> None:
    """Results are right, do not depend on other token rows or their number, and are the same again and captured."""
    if not is_hopper(torch.device("cuda")):
        pytest.skip("a kernel for Hopper")
    prepare_counters(torch.device("cuda"))

    def product(x: torch.Tensor) -> torch.Tensor:
        return multiply(x, padded_rows(len(x)))

    values, x = draw(64, k), torch.full((70, k), float("nan"), device="cuda", dtype=torch.bfloat16)
    first = None
    for num_rows in (1, 2, 16, 17, 32, 33, 64):
        x[:num_rows] = values[:num_rows]
        rows = x[:num_rows]
        stale = torch.full_like(product(rows), float("nan"))
        del stale  # the next result takes its memory
        made, right = product(rows), wanted(rows.double())
        assert float((made.double() - right).norm() / right.norm()) < 5e-3
        first = made if first is None else first
        assert torch.equal(made[:1], first), "another number of token rows"
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = [product(rows) for _ in range(4)]
        for _ in range(3):
            graph.replay()
        assert all(torch.equal(made, each) for each in captured)
    x[0] = float("nan")
    assert torch.equal(product(x[:64])[1:], made[1:]), "another token row"


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k", "outputs", "splits", "ring_bytes"), CASES)
def test_linear(n: int, k: int, outputs: int, splits: int, ring_bytes: int) -> None:
    weight = draw(n, k) * k**-0.5
    check(lambda x, rows: few_rows_linear(x, weight, plan=make_plan(rows, outputs, splits, False, ring_bytes)),
          lambda x: x @ weight.double().T, k)


@pytest.mark.gpu
@pytest.mark.parametrize(("activation", "splits"), [("silu", 1), ("gelu_pytorch_tanh", 1), ("silu", 3)])
def test_gated(activation: str, splits: int) -> None:
    combine = {"silu": reference.silu_mul, "gelu_pytorch_tanh": reference.gelu_tanh_mul}[activation]
    weight = draw(2 * 3000, 2048) * 2048**-0.5

    def wanted(x: torch.Tensor) -> torch.Tensor:
        return combine((x @ weight.double().T).bfloat16().double())

    check(lambda x, rows: few_rows_gated(x, weight, activation, plan=make_plan(rows, 64, splits, True, RING_BYTES)),
          wanted, 2048)


@pytest.mark.gpu
@pytest.mark.parametrize(("num_rows", "n", "k"), [(2, 4096, 4096), (9, 1024, 3072), (24, 2560, 4096), (64, 6144, 2560)])
def test_plans(num_rows: int, n: int, k: int) -> None:
    """Products as the table chooses them."""
    weight, x = draw(n, k) * k**-0.5, draw(num_rows, k)
    if is_hopper(x.device):
        assert is_fastest(x, weight)
    wanted = x.double() @ weight.double().T
    assert float((ops.linear(x, weight).double() - wanted).norm() / wanted.norm()) < 5e-3


@pytest.mark.gpu
def test_wide() -> None:
    weight, x = draw(70000, 4096) * 4096**-0.5, draw(17, 4096)
    wanted = x.double() @ weight.double().T
    made = ops.linear_wide(x, weight)
    assert made.dtype == torch.float32 and float((made.double() - wanted).norm() / wanted.norm()) < 1e-4
