"""Linear layers of few token rows in Triton: all they can add, odd sizes, and rows that do not see each other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="needs the triton package")

from outrider.kernels import reference
from outrider.kernels.gpu.linear.matvec import matvec, matvec_config
from outrider.kernels.gpu.linear.split import split_linear
from outrider.kernels.gpu.linear.thin import ThinConfig, gated_linear, thin_config, thin_linear

SMALL = ThinConfig(16, 64, 4, 2)
FEW_COLUMNS = ThinConfig(2, 64, 2, 1)


def draw(device: torch.device, dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape[:-1], shape[-1] + 8, generator=generator) / 4).to(device, dtype)[..., : shape[-1]]


def assert_close(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    limit = 1e-2 if actual.dtype == torch.bfloat16 else 1e-5
    assert float((actual.double() - wanted).norm() / wanted.norm()) < limit


@pytest.mark.parametrize("num_rows", [1, 3, 16, 17, 64])
def test_thin_linear(device: torch.device, dtype: torch.dtype, num_rows: int) -> None:
    check_linear(device, dtype, num_rows, partial(thin_linear, config=SMALL))


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4])
def test_matvec(device: torch.device, dtype: torch.dtype, num_rows: int) -> None:
    check_linear(device, dtype, num_rows, partial(matvec, config=FEW_COLUMNS))


@pytest.mark.parametrize("block_n", [1, 8])
def test_matvec_with_one_weight_row_a_program_and_with_many(device: torch.device, dtype: torch.dtype,
                                                            block_n: int) -> None:
    check_linear(device, dtype, 1, partial(matvec, config=ThinConfig(block_n, 64, 2, 1)))


def test_tiles_of_matvec() -> None:
    for k in (2560, 3072, 3584):
        tile = matvec_config(8192, k, is_small=False)
        assert k % tile.block_k == 0, "no thread is idle"
        assert tile.num_warps * 32 * 8 <= tile.block_n * tile.block_k
    assert matvec_config(8192, 2688, is_small=False).block_k == 2048, "nothing wide divides it"
    assert matvec_config(8192, 2560, is_small=False, is_gated=True) == matvec_config(8192, 2560, is_small=True)
    assert matvec_config(4096, 2560, is_small=False).block_n == 2, "few outputs make many programs"
    for k in (4096, 14336):
        large, small = matvec_config(8192, k, is_small=False), matvec_config(8192, k, is_small=True)
        assert (large.block_n, small.block_n) == (1, 2)
        assert (large.block_k, large.num_warps) == (small.block_k, small.num_warps), "the order of the sums"


def check_linear(device: torch.device, dtype: torch.dtype, num_rows: int, linear: Callable[..., torch.Tensor]) -> None:
    k, n = 200, 50
    x, weight = draw(device, dtype, num_rows, k), draw(device, dtype, n, k, seed=1)
    bias, residual = draw(device, dtype, 1, n, seed=3)[0], draw(device, dtype, num_rows, n, seed=4)
    product = x.double() @ weight.double().T
    assert_close(linear(x, weight), product)
    actual = linear(x, weight, bias, residual=residual, out_dtype=torch.float32)
    assert actual.dtype == torch.float32
    assert_close(actual.to(dtype), product + bias.double() + residual.double())
    linear(x, weight, bias, residual=residual, out=residual)
    assert torch.equal(residual, actual.to(dtype)), "the residual may be updated in place"


@pytest.mark.parametrize("linear", [partial(thin_linear, config=SMALL), matvec], ids=["thin", "matvec"])
def test_a_row_does_not_depend_on_the_others(device: torch.device, dtype: torch.dtype,
                                             linear: Callable[..., torch.Tensor]) -> None:
    """Nor on how many there are: a token has the same bits alone and among its drafts."""
    x, weight = draw(device, dtype, 4, 2600), draw(device, dtype, 40, 2600, seed=1)
    whole = linear(x, weight)
    poisoned = x.clone()
    poisoned[1] = float("nan")
    assert torch.equal(linear(poisoned, weight)[2:], whole[2:])
    for first in (1, 2, 3):
        assert torch.equal(linear(x[first:], weight), whole[first:])


def test_a_row_of_a_large_tile_does_not_depend_on_the_others(device: torch.device, dtype: torch.dtype) -> None:
    x, weight = draw(device, dtype, 64, 520), draw(device, dtype, 40, 520, seed=1)
    whole = thin_linear(x, weight, config=SMALL)
    for first in (1, 30, 47):
        poisoned = x.clone()
        poisoned[:first] = float("nan")
        assert torch.equal(thin_linear(poisoned, weight, config=SMALL)[first:], whole[first:])
        assert torch.equal(thin_linear(x[first:], weight, config=SMALL), whole[first:])


@pytest.mark.parametrize("num_rows", [1, 3, 4])
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", "relu2"])
def test_matvec_with_its_activation(num_rows: int, activation: str, device: torch.device, dtype: torch.dtype) -> None:
    x, weight = draw(device, dtype, num_rows, 72), draw(device, dtype, 2 * 19, 72, seed=1)
    product = (x.float() @ weight.float().t()).to(dtype)
    wanted = {"silu": reference.silu_mul, "gelu_pytorch_tanh": reference.gelu_tanh_mul, "relu2": reference.relu2}
    actual = matvec(x, weight, activation=activation, config=FEW_COLUMNS)
    torch.testing.assert_close(actual, wanted[activation](product), atol=2e-2 if dtype == torch.bfloat16 else 1e-5,
                               rtol=5e-2 if dtype == torch.bfloat16 else 1e-4)


def test_configs_cover_the_outputs() -> None:
    for n in (1, 1024, 4096, 6144, 28672, 151936):
        for num_rows in (1, 64):
            config = thin_config(n, 132, num_rows)
            assert config.block_n >= 1 and config.block_k <= 4096
            assert n <= 1024 or -(-n // config.block_n) >= 120, "every multiprocessor has work"


def test_wrapper_names_what_is_wrong(device: torch.device, dtype: torch.dtype) -> None:
    x, weight = draw(device, dtype, 2, 32), draw(device, dtype, 8, 32)
    for argument, call in (
        ("weight", lambda: thin_linear(x[:, :16], weight)),
        ("x", lambda: thin_linear(x.repeat(33, 1), weight)),
        ("weight", lambda: thin_linear(x, weight.double())),
        ("weight", lambda: thin_linear(x, weight.t().contiguous().t())),
        ("bias", lambda: thin_linear(x, weight, x[0])),
        ("residual", lambda: thin_linear(x, weight, residual=x)),
        ("out", lambda: thin_linear(x, weight, out=x)),
    ):
        with pytest.raises(ValueError, match=f"thin_linear: {argument} "):
            call()
    for argument, call in (
        ("x", lambda: matvec(x[:, :16], weight)),
        ("x", lambda: matvec(x.repeat(3, 1), weight)),
        ("activation", lambda: matvec(x, weight, activation="gelu")),
        ("bias", lambda: matvec(x, weight, x[0, :4], activation="silu")),
        ("out", lambda: matvec(x, weight, out=x)),
    ):
        with pytest.raises(ValueError, match=f"matvec: {argument} "):
            call()


@pytest.mark.parametrize("rows", [1, 3, 16, 33])
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_gated_linear_is_the_product_then_the_activation(rows: int, activation: str, device: torch.device,
                                                         dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 48, generator=generator).to(device, dtype)
    weight = torch.randn(2 * 37, 48, generator=generator).to(device, dtype)
    gate, up = (x.float() @ weight.float().t()).to(dtype).float().chunk(2, dim=1)
    acted = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    tolerance = {"atol": 1e-4, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.5, "rtol": 0.05}
    config = SMALL if dtype == torch.float32 else None  # the measured ones are for 16 bits
    torch.testing.assert_close(gated_linear(x, weight, activation, config=config).float(), acted * up, **tolerance)


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
