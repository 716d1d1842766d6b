"""Weights in GGUF's own bits: what they stand for, and products with the bits of the dequantised ones."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from torch import Tensor

from outrider.kernels import native, quantized
from outrider.kernels.native import measured
from outrider.kernels.quantized import KINDS, QuantizedProduct, QuantizedRows, round_activations

ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 32, 70, 130]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def make(kind: str, outputs: int, inputs: int) -> tuple[QuantizedRows, Tensor]:
    """Rows and, from the gguf library, the weights they stand for. Some scales are denormal in float16, some zero."""
    values = torch.randn(outputs, inputs)
    values[1::7] *= 1e-6
    values[2::7] = 0
    raw = quantize(values.numpy(), GGMLQuantizationType[kind])
    return QuantizedRows(kind, torch.from_numpy(raw)), torch.from_numpy(dequantize(raw, GGMLQuantizationType[kind]))


def need_native() -> None:
    if not native.available():
        pytest.skip(native.reason())


@pytest.mark.parametrize("kind", KINDS)
def test_dequantised_weights_are_those_of_the_library(kind: str) -> None:
    rows, want = make(kind, 50, 96)
    assert rows.shape == (50, 96) and rows.is_finite()
    assert torch.equal(rows.dequantize(), want)


@pytest.mark.parametrize("kind", KINDS)
def test_native_dequantising_gives_the_same_bits(kind: str) -> None:
    need_native()
    rows, want = make(kind, 50, 96)
    out = torch.full((33, 96), torch.nan)
    native.dequantize(rows.matrix(None), 10, out)
    assert torch.equal(out, want[10:43])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 32), (131, 96), (577, 64), (24, 1536)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_have_the_bits_of_the_dequantised_product(kind: str, shape: tuple[int, int], has_bias: bool) -> None:
    need_native()
    rows, weight = make(kind, *shape)
    bias = torch.randn(shape[0]) if has_bias else None
    product = QuantizedProduct(rows, bias)
    for n in ROWS:
        x = torch.randn(n, shape[1] + 3)[:, 3:]  # rows at a distance
        assert torch.equal(product(x), native.linear(x, weight, bias)), n


@pytest.mark.parametrize("minimum", [-0.5, 0.0, 6e-8, -3.1e-5, 60000.0])
def test_any_minimum_beside_any_scale_gives_the_bits_of_the_dequantised_product(minimum: float) -> None:
    """minimum - 128 * scale, which ARM code adds to weights of one token row, is a float32 number for some of these."""
    need_native()
    rows, _ = make("Q4_1", 203, 96)
    blocks = rows.data.view(203, 3, 20)
    blocks[200, 1, :4] = torch.tensor([0.37, minimum], dtype=torch.float16).view(torch.uint8)
    x = torch.randn(1, 96)
    assert torch.equal(native.product(x, rows.matrix(None)), native.linear(x, rows.dequantize()))


@pytest.mark.parametrize("bits", [8, 32])
def test_no_token_rows_have_no_products(bits: int) -> None:
    need_native()
    assert QuantizedProduct(make("Q4_1", 131, 64)[0], None, activation_bits=bits)(torch.randn(0, 64)).shape == (0, 131)


@pytest.mark.parametrize("kind", KINDS)
def test_infinite_scales_are_found(kind: str) -> None:
    rows, _ = make(kind, 3, 64)
    for at in (0, 2) if kind == "Q4_1" else (0,):
        data = rows.data.clone()
        data[1, at : at + 2] = torch.from_numpy(np.array([np.inf], dtype=np.float16).view(np.uint8))
        assert not QuantizedRows(kind, data).is_finite()


@pytest.mark.parametrize(("kept", "dense"), [(1.0, 2.0), (2.0, 1.0)])
def test_bits_are_kept_where_their_products_are_not_slower(
    kept: float, dense: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_native()
    monkeypatch.setattr(quantized, "product_seconds", lambda matrices: [kept, dense])
    monkeypatch.setattr(quantized, "TRIAL_SHAPE", (64, 64))
    monkeypatch.setattr(quantized, "remembered", lambda name, measure: measure())
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert quantized.kept_bits_are_fast.__wrapped__() == (kept <= dense)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert quantized.kept_bits_are_fast.__wrapped__()


def test_a_measurement_is_remembered_beside_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "library", lambda: SimpleNamespace(_name=str(tmp_path / "native-1.so")))
    answers = iter([True, False])
    assert measured.remembered("it", lambda: next(answers)) and measured.remembered("it", lambda: next(answers))
    (tmp_path / "native-1.json").write_text("half a fi")
    assert not measured.remembered("it", lambda: next(answers)), "a damaged file is measured anew"
    assert not measured.remembered("it", lambda: next(answers))
    assert [path.name for path in tmp_path.iterdir()] == ["native-1.json"]


def test_products_are_timed_in_turns() -> None:
    need_native()
    small, large = (make("Q4_1", outputs, 64)[0].matrix(None) for outputs in (8, 20000))
    small_seconds, large_seconds = quantized.product_seconds([small, large])
    assert 0 < small_seconds < large_seconds


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 32), (131, 96), (24, 1536)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_eight_activation_bits_round_the_token_rows_and_nothing_else(
    kind: str, shape: tuple[int, int], has_bias: bool
) -> None:
    need_native()
    rows, weight = make(kind, *shape)
    bias = torch.randn(shape[0]) if has_bias else None
    product = QuantizedProduct(rows, bias, activation_bits=8)
    for n in (*ROWS, 67):
        x = torch.randn(n, shape[1] + 3)[:, 3:]
        x[0, :32] = 0  # a block without a largest number
        x[-1, -32:] = torch.arange(-16, 16) * 127.0  # the largest numbers that eight bits hold, of both signs
        got = product(x)
        want = torch.nn.functional.linear(round_activations(x.contiguous()).double(), weight.double())
        want = want if bias is None else want + bias
        torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=2e-6 * float(want.abs().max()))
        for row in (0, n // 2, n - 1):
            assert torch.equal(got[row], product(x[row : row + 1])[0]), "a row depends on the number of rows"
    assert 0 < product.rounding_error() < 0.05
    assert QuantizedProduct(rows, bias).rounding_error() == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_eight_activation_bits_keep_what_is_not_finite(kind: str, bad: float) -> None:
    """NaN is not the largest of its block by any comparison of numbers; it must not become an ordinary number."""
    need_native()
    product = QuantizedProduct(make(kind, 9, 96)[0], None, activation_bits=8)
    for n in (1, 3, 4, 8, 13):
        x = torch.randn(n, 96)
        good = product(x)
        for row in {0, n // 2, n - 1}:
            for column in (0, 33, 95):
                spoilt = x.clone()
                spoilt[row, column] = bad
                got = product(spoilt)
                assert not got[row].isfinite().any()
                assert torch.equal(got[torch.arange(n) != row], good[torch.arange(n) != row])


def test_eight_activation_bits_take_the_smallest_numbers_for_zero() -> None:
    need_native()
    product = QuantizedProduct(make("Q4_1", 9, 64)[0], None, activation_bits=8)
    x = torch.randn(5, 64)
    zeros = x.clone()
    x[:, :32] *= 1e-41
    zeros[:, :32] = 0
    assert torch.equal(product(x), product(zeros))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("outputs", [5, 32, 131])
def test_interleaved_rows_hold_the_same_bytes(kind: str, outputs: int) -> None:
    """Of 16 weight rows and a block: all scales, all minima, four bytes of numbers of each row, the next four, ..."""
    need_native()
    rows, _ = make(kind, outputs, 96)
    code = {"Q8_0": native.Q8_0, "Q4_0": native.Q4_0, "Q4_1": native.Q4_1}[kind]
    groups, head = -(-outputs // 16), 4 if kind == "Q4_1" else 2
    blocks = torch.zeros(groups * 16, 3, rows.data.shape[1] // 3, dtype=torch.uint8)
    blocks[:outputs] = rows.data.view(outputs, 3, -1)
    blocks = blocks.view(groups, 16, 3, -1).transpose(1, 2)  # [groups, blocks, rows, bytes]
    heads, numbers = (part.unflatten(3, (-1, size)).transpose(2, 3).flatten(2)
                      for part, size in ((blocks[..., :head], 2), (blocks[..., head:], 4)))
    matrix = native.interleaved(rows.data, None, code, 96)
    assert matrix.kind == code + native.LANES and matrix.outputs == outputs
    whole = matrix.data.as_strided((groups, 3, heads.shape[2] + numbers.shape[2]), (3 * 16 * blocks.shape[3],
                                                                                   16 * blocks.shape[3], 1))
    assert torch.equal(whole, torch.cat((heads, numbers), 2))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 32), (131, 96), (24, 1536)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_interleaved_rows_give_the_same_bits(kind: str, shape: tuple[int, int], has_bias: bool) -> None:
    need_native()
    rows, _ = make(kind, *shape)
    bias = torch.randn(shape[0]) if has_bias else None
    code = {"Q8_0": native.Q8_0, "Q4_0": native.Q4_0, "Q4_1": native.Q4_1}[kind]
    apart, chosen = native.Matrix(rows.data, bias, code + native.INT8, shape[1]), rows.matrix(bias, 8)
    if chosen.kind == apart.kind:
        pytest.skip("weight rows are not interleaved on this machine")
    for n in (*ROWS, 67):
        x = torch.randn(n, shape[1] + 3)[:, 3:]
        assert torch.equal(native.product(x, chosen), native.product(x, apart)), n


def test_rounded_activations_are_close() -> None:
    x = torch.randn(3, 96)
    steps = x.view(3, 3, 32).abs().amax(-1, keepdim=True) / 127
    assert ((round_activations(x) - x).view(3, 3, 32).abs() <= steps * 0.5001).all()
