"""Thin linear layers in Triton: every prologue and epilogue, odd sizes, and rows that do not see each other."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="needs the triton package")

from outrider.kernels.triton.split_linear import split_linear  # noqa: E402
from outrider.kernels.triton.thin_linear import ThinConfig, gated_linear, thin_config, thin_linear  # noqa: E402

SMALL = ThinConfig(16, 64, 4, 2)


def draw(device: torch.device, dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape[:-1], shape[-1] + 8, generator=generator) / 4).to(device, dtype)[..., : shape[-1]]


def prepared(x: torch.Tensor, prologue: str | None, norm_weight: torch.Tensor, plus_one: bool) -> torch.Tensor:
    x = x.double()
    if prologue == "rms_norm":
        return F.rms_norm(x, x.shape[-1:], norm_weight.double() + plus_one, 1e-6)
    if prologue is None:
        return x
    gate, up = x.chunk(2, dim=-1)
    return (F.silu(gate) if prologue == "silu_mul" else F.gelu(gate, approximate="tanh")) * up


def assert_close(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    limit = 1e-2 if actual.dtype == torch.bfloat16 else 1e-5
    assert float((actual.double() - wanted).norm() / wanted.norm()) < limit


@pytest.mark.parametrize("num_rows", [1, 3, 16])
@pytest.mark.parametrize("prologue", [None, "rms_norm", "silu_mul", "gelu_tanh_mul"])
def test_thin_linear(device: torch.device, dtype: torch.dtype, num_rows: int, prologue: str | None) -> None:
    k, n, plus_one = 200, 50, num_rows == 3
    x = draw(device, dtype, num_rows, 2 * k if prologue in ("silu_mul", "gelu_tanh_mul") else k)
    weight, norm_weight = draw(device, dtype, n, k, seed=1), draw(device, dtype, 1, k, seed=2)[0]
    bias, residual = draw(device, dtype, 1, n, seed=3)[0], draw(device, dtype, num_rows, n, seed=4)
    options = {"norm_weight": norm_weight, "plus_one": plus_one} if prologue == "rms_norm" else {}
    product = prepared(x, prologue, norm_weight, plus_one) @ weight.double().T
    actual = thin_linear(x, weight, prologue=prologue, config=SMALL, **options)
    assert_close(actual, product)
    actual = thin_linear(x, weight, bias, prologue=prologue, residual=residual, out_dtype=torch.float32, **options)
    assert actual.dtype == torch.float32
    assert_close(actual.to(dtype), product + bias.double() + residual.double())
    thin_linear(x, weight, bias, prologue=prologue, residual=residual, out=residual, **options)
    assert torch.equal(residual, actual.to(dtype)), "the residual may be updated in place"


def test_a_row_does_not_depend_on_the_others(device: torch.device, dtype: torch.dtype) -> None:
    x, weight = draw(device, dtype, 5, 128), draw(device, dtype, 40, 128, seed=1)
    whole = thin_linear(x, weight, config=SMALL)
    poisoned = x.clone()
    poisoned[1] = float("nan")
    assert torch.equal(thin_linear(poisoned, weight, config=SMALL)[2:], whole[2:])
    assert torch.equal(thin_linear(x[2:], weight, config=SMALL), whole[2:])
    assert torch.equal(thin_linear(x[4:], weight, config=SMALL, exact_rows=True), whole[4:])


def test_configs_cover_the_outputs() -> None:
    for num_rows in (1, 4):
        for n in (1, 1024, 4096, 6144, 28672, 151936):
            config = thin_config(num_rows, n, 4096, 132)
            assert config.block_n >= 1 and config.block_k <= 4096
            assert n <= 1024 or -(-n // config.block_n) >= 120, "every multiprocessor has work"


def test_wrapper_names_what_is_wrong(device: torch.device, dtype: torch.dtype) -> None:
    x, weight = draw(device, dtype, 2, 32), draw(device, dtype, 8, 32)
    for argument, call in (
        ("x", lambda: thin_linear(x[:, :16], weight)),
        ("x", lambda: thin_linear(x.repeat(9, 1), weight)),
        ("x", lambda: thin_linear(x, weight, prologue="silu_mul")),
        ("weight", lambda: thin_linear(x, weight.double())),
        ("weight", lambda: thin_linear(x, weight.t().contiguous().t())),
        ("bias", lambda: thin_linear(x, weight, x[0])),
        ("prologue", lambda: thin_linear(x, weight, prologue="norm")),
        ("norm_weight", lambda: thin_linear(x, weight, prologue="rms_norm")),
        ("residual", lambda: thin_linear(x, weight, residual=x)),
        ("out", lambda: thin_linear(x, weight, out=x)),
    ):
        with pytest.raises(ValueError, match=f"thin_linear: {argument} "):
            call()


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("activation", ["silu_mul", "gelu_tanh_mul"])
def test_gated_linear_is_the_product_then_the_activation(rows: int, activation: str, device: torch.device,
                                                         dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 48, generator=generator).to(device, dtype)
    weight = torch.randn(2 * 37, 48, generator=generator).to(device, dtype)
    gate, up = (x.float() @ weight.float().t()).to(dtype).float().chunk(2, dim=1)
    acted = F.silu(gate) if activation == "silu_mul" else F.gelu(gate, approximate="tanh")
    tolerance = {"atol": 1e-4, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.5, "rtol": 0.05}
    torch.testing.assert_close(gated_linear(x, weight, activation).float(), acted * up, **tolerance)


@pytest.mark.parametrize(("num_rows", "n", "k"), [(1, 21, 512), (5, 24, 1024), (16, 8, 512)])
def test_split_linear(device: torch.device, dtype: torch.dtype, num_rows: int, n: int, k: int) -> None:
    x, weight = draw(device, dtype, num_rows, k), draw(device, dtype, n, k, seed=1)
    residual = draw(device, dtype, num_rows, n, seed=2)
    product = x.double() @ weight.double().T
    assert_close(split_linear(x, weight), product)
    wanted = split_linear(x, weight, residual=residual)
    assert_close(wanted, product + residual.double())
    split_linear(x, weight, residual=residual, out=residual)
    assert torch.equal(residual, wanted), "the residual may be updated in place"
    poisoned = x.clone()
    poisoned[0] = float("nan")
    assert torch.equal(split_linear(poisoned, weight)[1:], split_linear(x, weight)[1:])
    if num_rows > 2:
        assert torch.equal(split_linear(x[2:], weight), split_linear(x, weight)[2:])
    with pytest.raises(ValueError, match="split_linear: weight has 96 columns"):
        split_linear(x[:, :96], weight[:, :96])
