"""The CPU products: equal to the plain product for every number of token rows, and to themselves bit for bit."""

from __future__ import annotations

import pytest
import torch

from outrider.kernels import cpu as native
from outrider.kernels.cpu import products as cpu_linear
from outrider.kernels.cpu.products import make_product

ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 32, 33, 70]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def without_native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_linear.native, "available", lambda: False)
    monkeypatch.setattr(cpu_linear.native, "linear", None)


def need_native() -> None:
    if not native.available():
        pytest.skip(native.reason())


def check(product: cpu_linear.CpuProduct, rows: int) -> None:
    x = torch.randn(rows, product.weight.shape[1] + 3)[:, 3:]
    bias = None if product.bias is None else product.bias.double()
    want = torch.nn.functional.linear(x.double(), product.weight.double(), bias).float()
    torch.testing.assert_close(product(x), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 1), (24, 16), (25, 17), (97, 201), (577, 64)])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_equals_the_plain_product(shape: tuple[int, int], has_bias: bool, packed: bool) -> None:
    weight, bias = torch.randn(shape), torch.randn(shape[0]) if has_bias else None
    product = make_product(weight, bias, packed)
    for rows in ROWS:
        check(product, rows)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.usefixtures("without_native")
def test_equals_the_plain_product_without_native(packed: bool, exact: bool) -> None:
    product = make_product(torch.randn(96, 64), torch.randn(96), packed, exact)
    for rows in ROWS:
        check(product, rows)


@pytest.mark.usefixtures("without_native")
def test_exact_products_without_native_are_equal_calls_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library may choose its order of additions by the shape of a call and by where its operands lie in memory."""
    product, calls = make_product(torch.randn(24, 17), exact=True), set()

    def linear(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        calls.add((x.shape, x.stride(), x.data_ptr() % 64))
        return torch.zeros(1, 24)

    monkeypatch.setattr(cpu_linear.F, "linear", linear)
    for rows in (1, 3, 70):
        assert product(torch.randn(rows + 1, 17)[1:]).shape == (rows, 24)
    assert len(calls) == 1


@pytest.mark.parametrize("inputs", [64, 201])
def test_exact_rows_have_the_same_bits(inputs: int) -> None:
    need_native()
    product = make_product(torch.randn(131, inputs), torch.randn(131), exact=True)
    x = torch.randn(70, inputs)
    whole = product(x)
    for rows in ROWS:
        assert torch.equal(product(x[70 - rows :]), whole[70 - rows :]), rows


@pytest.mark.parametrize("threads", [2, 3, 5, 16])
@pytest.mark.parametrize("outputs", [257, 600])
def test_threads_share_the_weight_rows(threads: int, outputs: int) -> None:
    """Every weight row is multiplied, whoever does it: threads take pieces from each other, and there may be more
    threads than pieces or processors. Rows beyond 128 are a second loop of the same threads."""
    need_native()
    matrix = native.Matrix(torch.randn(outputs, 96), None, native.FLOATS, 96)
    for rows in (1, 8, 200) * 10:
        x = torch.randn(rows, 96)
        assert torch.equal(native.product(x, matrix, threads=threads), native.product(x, matrix, threads=1))


@pytest.mark.usefixtures("without_native")
def test_exact_rows_have_the_same_bits_without_native() -> None:
    product = make_product(torch.randn(131, 64), exact=True)
    x = torch.randn(9, 64)
    assert torch.equal(product(x)[:1], product(x[:1]))


@pytest.mark.parametrize("inputs", [201, 1601])
def test_bfloat16_weights_are_kept_in_half_the_bytes_and_give_the_same_bits(inputs: int) -> None:
    need_native()
    weight = torch.randn(131, inputs).bfloat16().float()
    plain, packed = make_product(weight), make_product(weight, packed=True)
    assert (plain.extra_bytes, packed.extra_bytes) == (0, weight.nbytes // 2)
    for rows in ROWS:
        x = torch.randn(rows, inputs)
        assert torch.equal(packed(x), plain(x))


def test_weights_that_would_be_rounded_are_not_copied() -> None:
    need_native()
    assert make_product(torch.full((4, 4), 1 / 3), packed=True).extra_bytes == 0


@pytest.mark.usefixtures("without_native")
def test_packed_copy_is_counted() -> None:
    weight = torch.randn(96, 64)
    assert make_product(weight, packed=True).extra_bytes >= weight.nbytes
    assert make_product(weight, packed=False).extra_bytes == 0
    assert make_product(weight, packed=True, exact=True).extra_bytes == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_go_to_the_library(dtype: torch.dtype) -> None:
    weight, x = torch.randn(8, 16, dtype=dtype), torch.randn(5, 16, dtype=dtype)
    product = make_product(weight, packed=True)
    assert torch.equal(product(x), torch.nn.functional.linear(x, weight))
    assert product.extra_bytes == 0


def test_strided_weight_goes_to_the_library() -> None:
    weight = torch.randn(16, 8).t()
    x = torch.randn(3, 16)
    assert torch.equal(make_product(weight, packed=True)(x), torch.nn.functional.linear(x, weight))


def test_no_token_rows() -> None:
    assert make_product(torch.randn(8, 16))(torch.randn(0, 16)).shape == (0, 8)
