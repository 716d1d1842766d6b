"""Hopper's kernel of products with weights of codes on a card, against float64, with NaN where nothing may be read."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="needs the triton package")

from outrider.kernels import ops, scaled
from outrider.kernels.gpu.attention.merge import prepare_counters
from outrider.kernels.gpu.hopper.coded.rows import arrange, coded_rows, make_plan, tile_rows
from outrider.kernels.gpu.hopper.prefill import is_hopper
from outrider.kernels.gpu.linear.rounding import round_rows
from outrider.kernels.scaled import Scaled

FORMS = ("fp8", "steps", "blocks", "int4", "int4 with zeros", "Q4_K", "Q2_K", "Q6_K", "Q8_0")
SHORT = {"Q4_K": ("int4", 32), "Q2_K": ("int4", 16), "Q6_K": ("int8", 16), "Q8_0": ("int8", 32)}  # codes, short groups
# Outputs, inner dimension, groups of warps, splits, whether a program fills a multiprocessor.
CASES = [(960, 1152, 1, 1, True), (1024, 4096, 2, 3, False), (4096, 1024, 1, 4, False), (1984, 2048, 2, 1, False)]


def make(form: str, n: int, k: int) -> tuple[Scaled, torch.Tensor]:
    """(a weight, its numbers)."""
    generator = torch.Generator("cuda").manual_seed(n + k)
    code, group = SHORT.get(form, ("int4" if form.startswith("int4") else "fp8", k if form == "fp8" else 128))
    groups = k // group
    if code == "fp8":
        codes = torch.randn(n, k, device="cuda", generator=generator).to(torch.float8_e4m3fn)
    else:
        width = k // scaled.codes_per_byte(code)
        codes = torch.randint(0, 256, (n, width), device="cuda", generator=generator, dtype=torch.uint8)
        codes = codes.view(scaled.code_dtype(code))
    scales = (0.5 + torch.rand(groups, n, device="cuda", generator=generator)) / 64
    if form == "blocks":
        scales = scales[:, ::128].repeat_interleave(128, 1)[:, :n].contiguous()
    zeros = torch.randint(-8, 9, (groups, n), device="cuda", generator=generator).half() if "zeros" in form else None
    scales = scales if code == "fp8" else scales.bfloat16()
    offsets = torch.randn(groups, n, device="cuda", generator=generator).bfloat16() / 32 if form in ("Q4_K",
                                                                                                     "Q2_K") else None
    weight = Scaled(code, group, codes, scales.T, None if zeros is None else zeros.T,
                    offsets=None if offsets is None else offsets.T)
    numbers = weight.numbers().double()
    return (weight if form in ("fp8", "steps") else arrange(weight, torch.bfloat16)), numbers


@pytest.mark.parametrize("form", FORMS)
def test_products(form: str) -> None:
    """Results are right, do not depend on other token rows, and are the same again and captured."""
    if not is_hopper(torch.device("cuda")):
        pytest.skip("a kernel for Hopper")
    prepare_counters(torch.device("cuda"))
    for n, k, *shared_out in CASES:
        n = -(-n // 128) * 128 if form == "blocks" else n
        weight, numbers = make(form, n, k)
        bias = torch.randn(n, device="cuda", dtype=torch.bfloat16)
        given = torch.randn(64, k, device="cuda", dtype=torch.bfloat16)
        x = torch.full((70, k), float("nan"), device="cuda", dtype=torch.bfloat16)
        for num_rows in (1, 2, 8, 9, 16, 17, 32, 33, 64):
            rows = next(rows for rows in tile_rows(weight.code) if num_rows <= rows)
            if rows == 64 and shared_out[0] == 2 and not shared_out[2]:
                continue  # has no plan: registers for one program alone
            x[:num_rows] = given[:num_rows]
            values = x_scales = rounded = x[:num_rows]
            if weight.code == "fp8":
                values, x_scales = round_rows(x[:num_rows], weight.group, by_group=weight.group < k)
                rounded = Scaled("fp8", weight.group, values, x_scales).numbers()[:num_rows]
            product = F.linear(rounded.double(), numbers)
            for activation in (None, "silu"):
                if activation and (n % 128 or shared_out[:2] != [2, 1]):
                    continue
                plan = make_plan(weight, rows, *shared_out, activation is not None)  # type: ignore[arg-type]
                out = torch.full((num_rows, n // 2 if activation else n), float("nan"), device="cuda",
                                 dtype=torch.bfloat16)
                call = [values, x_scales, weight, bias, out]
                coded_rows(*call, activation=activation, plan=plan)  # type: ignore[arg-type]
                wanted = product + bias.double()
                if activation:
                    gate, up = wanted.bfloat16().double().chunk(2, 1)
                    wanted = F.silu(gate) * up
                assert float((out.double() - wanted).norm() / wanted.norm()) < 4e-3, (n, k, num_rows, activation)
                first = out.clone()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    coded_rows(*call, activation=activation, plan=plan)  # type: ignore[arg-type]
                for _ in range(3):
                    out.fill_(float("nan"))
                    graph.replay()
                    assert torch.equal(out, first)


@pytest.mark.parametrize("k", [2048, 1152])  # the second has 9 blocks, of which the library wants multiples of 4
@pytest.mark.parametrize("form", FORMS)
def test_operations(form: str, k: int) -> None:
    """One token row and many, through the table, with and without a gate; the bits of few rows are those of one."""
    if not is_hopper(torch.device("cuda")):
        pytest.skip("a kernel for Hopper")
    prepare_counters(torch.device("cuda"))
    weight, numbers = make(form, 1024, k)
    rounding = weight.group if weight.code == "fp8" else 0
    given = torch.randn(301, k, device="cuda", dtype=torch.bfloat16)
    rounded = scaled.rounded(given.cpu(), rounding).to("cuda") if rounding else given
    wanted = F.linear(rounded.double(), numbers)
    gate, up = wanted.bfloat16().double().chunk(2, 1)
    gated = F.silu(gate) * up
    for num_rows in (1, 5, 64, 65, 67, 128, 301):
        x, right = given[:num_rows], wanted[:num_rows]
        made = ops.scaled_linear(x, weight, None, rounding)
        assert float((made.double() - right).norm() / right.norm()) < 6e-3, num_rows
        wide = ops.scaled_wide(x, weight, rounding)
        assert wide.dtype == torch.float32 and float((wide.double() - right).norm() / right.norm()) < 6e-3, num_rows
        if num_rows <= 64:
            assert ops.scaled_gated.has_kernel(x, weight, None, rounding, "silu")
            made = ops.scaled_gated(x, weight, None, rounding, "silu")
            assert float((made.double() - gated[:num_rows]).norm() / gated[:num_rows].norm()) < 8e-3, num_rows
