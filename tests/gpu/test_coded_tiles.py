"""Hopper's kernel of int4 and int8 codes for 65 token rows and more on a card, against float64, with NaN where nothing
may be read."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="needs the triton package")

from outrider.kernels.gpu.attention.merge import prepare_counters
from outrider.kernels.gpu.hopper.coded.tiles import SHAPES, coded_tiles, make_plan
from outrider.kernels.gpu.hopper.prefill import is_hopper
from tests.gpu.test_coded_rows import make


@pytest.mark.parametrize("form", ["int4", "int4 with zeros", "Q4_K", "Q2_K", "Q6_K", "Q8_0"])
def test_products(form: str) -> None:
    """Every tile, with and without splits and gates: results are right, and the same again and captured."""
    if not is_hopper(torch.device("cuda")):
        pytest.skip("a kernel for Hopper")
    prepare_counters(torch.device("cuda"))
    for n, k in ((1920, 1152), (1024, 4096)):
        weight, numbers = make(form, n, k)
        bias = torch.randn(n, device="cuda", dtype=torch.bfloat16)
        given = torch.full((310, k), float("nan"), device="cuda", dtype=torch.bfloat16)
        for num_rows in (65, 96, 128, 129, 256, 300):
            given.fill_(float("nan"))
            x = given[:num_rows].normal_()
            product = F.linear(x.double(), numbers) + bias.double()
            gate, up = product.bfloat16().double().chunk(2, 1)
            for shape in SHAPES:
                for splits, activation in ((1, None), (3, None), (1, "silu")):
                    if activation and shape.blocks < 2:
                        continue
                    plan = make_plan(weight, shape, splits, 2)

                    def call() -> torch.Tensor:
                        return coded_tiles(x, weight, bias, torch.bfloat16, activation=activation, plan=plan)  # noqa: B023

                    first = call()
                    wanted = F.silu(gate) * up if activation else product
                    error = float((first.double() - wanted).norm() / wanted.norm())
                    assert error < (8e-3 if activation else 4e-3), (n, k, num_rows, shape, splits, activation)
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        again = call()
                    for _ in range(2):
                        again.fill_(float("nan"))
                        graph.replay()
                        assert torch.equal(again, first)
