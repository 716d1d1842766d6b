"""Weights in GGUF's kinds: what their bits stand for, how they are packed, and products with packed weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from outrider.kernels import cpu as native
from outrider.kernels import quantized
from outrider.kernels.cpu import measured
from outrider.kernels.cpu.packed import PackedMatrix
from outrider.kernels.gguf_kinds import KINDS
from outrider.kernels.quantized import QuantizedRows, round_activations, rounding_error

ROWS = [1, 2, 3, 5, 8, 13, 64, 70, 300]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def make(kind: str, outputs: int, inputs: int, scale: float = 1.0) -> tuple[QuantizedRows, Tensor]:
    """Random bits and, from the gguf library, the weights they stand for. Some scales are denormal in float16, some
    zero, and some negative. Widths are rounded up to whole blocks."""
    block, size = KINDS[kind].block, KINDS[kind].block_bytes
    blocks = torch.randint(0, 256, (outputs, -(-inputs // block), size), dtype=torch.uint8)
    for at in KINDS[kind].halves:
        scales = torch.randn(blocks.shape[:2]) * scale
        scales[1::7] *= 1e-6
        scales[2::7] = 0
        blocks[..., at : at + 2] = scales.half().unsqueeze(-1).view(torch.uint8)
    if kind == "MXFP4":
        blocks[..., 0] = torch.randint(120, 130, blocks.shape[:2])
    rows = QuantizedRows(kind, blocks.flatten(1))
    return rows, torch.from_numpy(dequantize(rows.data.numpy(), GGMLQuantizationType[kind]))


def need_native() -> None:
    if not native.available():
        pytest.skip(native.reason())


@pytest.mark.parametrize("kind", KINDS)
def test_dequantised_weights_are_those_of_the_library(kind: str) -> None:
    rows, want = make(kind, 50, 512)
    assert rows.shape == (50, 512) and rows.is_finite()
    assert torch.equal(rows.dequantize(), want)


def test_every_exponent_of_four_bit_floats_is_a_power_of_two() -> None:
    blocks = torch.zeros(256, 1, 17, dtype=torch.uint8)
    blocks[:, 0, 0] = torch.arange(256)
    blocks[:, 0, 1:] = 0x71
    rows = QuantizedRows("MXFP4", blocks.flatten(1))
    assert torch.equal(rows.dequantize(), torch.from_numpy(dequantize(rows.data.numpy(), GGMLQuantizationType.MXFP4)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("outputs", [1, 5, 35])
def test_packed_rows_stand_for_the_same_numbers_in_about_as_many_bytes(kind: str, outputs: int) -> None:
    need_native()
    rows, want = make(kind, outputs, 96)
    packed = rows.pack()
    chosen = torch.randint(0, outputs, (9,))
    assert torch.equal(packed.look_up(torch.arange(outputs)), want)
    assert torch.equal(packed.look_up(chosen), want[chosen])
    lanes = native.packed_lanes()
    assert packed.data.nbytes * outputs <= 1.25 * rows.data.nbytes * -(-outputs // lanes) * lanes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("outputs", "blocks"), [(1, 1), (4, 3), (33, 2), (64, 5)])
def test_blocks_are_packed_bit_for_bit_as_their_codes_are(kind: str, outputs: int, blocks: int) -> None:
    """Whatever their bits are: numbers that are not finite are refused elsewhere."""
    need_native()
    made = KINDS[kind]
    data = torch.randint(0, 256, (outputs, blocks, made.block_bytes), dtype=torch.uint8)
    for at in made.halves:
        data[..., at + 1] &= 0xBB  # no exponent has all of its bits
    want = quantized.empty_rows(kind, outputs, blocks * made.block, torch.device("cpu"))
    native.pack_rows(*made.unpack(data), want.form, want.data)
    wider = torch.cat((data, data), 1)[:, :blocks]  # rows at a distance, as those of which a rank holds a part
    permuted = data[torch.arange(outputs).flip(0)].flip(0)
    for given in (data, wider, data.transpose(0, 1).contiguous().transpose(0, 1), permuted):
        packed = quantized.empty_rows(kind, outputs, blocks * made.block, torch.device("cpu"))
        packed.data.fill_(255)
        native.pack_blocks(kind, given, packed)
        assert torch.equal(packed.data, want.data)


def test_every_half_and_every_power_of_two_is_read_as_torch_reads_it() -> None:
    need_native()
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.float16)
    halves = halves[halves.isfinite()]
    blocks = torch.zeros(len(halves), 1, 34, dtype=torch.uint8)
    blocks[..., :2] = halves.view(-1, 1, 1).view(torch.uint8)
    blocks[..., 2] = 1
    packed = QuantizedRows("Q8_0", blocks.flatten(1)).pack()
    found = packed.data.view(-1, 36 * native.packed_lanes())[:, : 4 * native.packed_lanes()].contiguous()
    assert torch.equal(found.view(torch.int32).flatten()[: len(halves)], halves.float().view(torch.int32))
    powers = torch.zeros(256, 1, 17, dtype=torch.uint8)
    powers[:, 0, 0], powers[:, 0, 1:] = torch.arange(256), 0x71
    rows = QuantizedRows("MXFP4", powers.flatten(1))
    assert torch.equal(rows.pack().look_up(torch.arange(256)), rows.dequantize())


@pytest.mark.parametrize("kind", ["Q8_0", "Q6_K"])
def test_packed_rows_are_rounded_to_four_bits(kind: str) -> None:
    need_native()
    rows, want = make(kind, 37, 512)
    coarse = rows.pack().coarsened()
    assert coarse.data.nbytes < rows.pack().data.nbytes
    numbers, found = want.view(37, -1, 32), coarse.look_up(torch.arange(37)).view(37, -1, 32)
    largest, place = numbers.abs().max(2, keepdim=True)
    steps = largest / 8
    assert torch.allclose(found.gather(2, place), numbers.gather(2, place), rtol=1e-6)
    assert torch.allclose(found, (found / steps.clamp_min(1e-30)).round() * steps, rtol=1e-5), "whole steps"
    is_cut = numbers * numbers.gather(2, place).sign() < -7.5 * steps  # 8 codes on one side of 0, 7 on the other
    error = (found - numbers).abs() / steps.clamp_min(1e-30)
    assert error[~is_cut].max() < 0.51 and error.max() < 1.01 and is_cut.any()


@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows_are_taken_bit_for_bit(kind: str) -> None:
    """In any order and repeated, also into lanes that have too few."""
    need_native()
    rows = make(kind, 75, 2 * KINDS[kind].block)[0].pack()
    ids = torch.tensor([74, 3, 3, 17, 0, 40, 41, 16, 15, 31, 32, 9, 8, 7, 6, 5, 4, 2, 1, 70])
    taken = quantized.empty_rows(kind, len(ids), rows.inputs, torch.device("cpu"))
    taken.data.fill_(255)
    rows.take(ids, taken)
    assert torch.equal(taken.look_up(torch.arange(len(ids))), rows.look_up(ids))
    with pytest.raises(IndexError, match="a row is outside of the 75 weight rows"):
        rows.take(ids + 1, taken)


def check_products(rows: QuantizedRows, weight: Tensor, bias: Tensor | None, counts: list[int]) -> None:
    """Products are as close as those in float32, or round the token rows and nothing else; rows do not depend on each
    other."""
    packed = [rows.pack()]
    for bits, rounding in ((24, lambda x: x), (16, partial(round_activations, bits=16)), (8, round_activations)):
        matrix = PackedMatrix(packed, bias, bits)
        for n in counts:
            x = torch.randn(n, weight.shape[1] + 3)[:, 3:]  # rows at a distance
            x[0, :32] = 0  # a group without a largest number
            x[-1, -32:] = torch.arange(-16, 16) * 127.0  # the largest numbers that eight bits hold, of both signs
            got, seen = native.product(x, matrix), rounding(x.contiguous()).double()
            want = seen @ weight.double().T + (0 if bias is None else bias)
            most = seen.abs() @ weight.double().abs().T + (1e-30 if bias is None else bias.abs())
            assert float(((got - want).abs() / most).max()) < 1e-6, (bits, n)
            for row in {0, n // 2, n - 1}:
                assert torch.equal(got[row], native.product(x[row : row + 1], matrix)[0]), "rows depend on each other"
    assert 0 < rounding_error(packed, bias, 16) < rounding_error(packed, bias, 8) / 50 < 0.001


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_those_of_the_dequantised_weight(kind: str, has_bias: bool) -> None:
    need_native()
    rows, weight = make(kind, 37, 96, 0.1)
    check_products(rows, weight, torch.randn(37) if has_bias else None, [1, 3, 13])


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 32), (131, 96), (577, 64), (24, 1536), (40, 2304)])
def test_products_of_many_shapes_and_rows(kind: str, shape: tuple[int, int]) -> None:
    need_native()
    check_products(*make(kind, *shape, 0.1), torch.randn(shape[0]), ROWS)


@pytest.mark.parametrize("bits", [8, 16, 24])
def test_a_matrix_has_rows_of_several_kinds(bits: int) -> None:
    need_native()
    made = [make(kind, outputs, 256) for kind, outputs in (("Q4_K", 7), ("Q8_0", 32), ("Q6_K", 5), ("IQ4_NL", 40))]
    matrix, bias = PackedMatrix([rows.pack() for rows, _ in made], None, bits), torch.randn(84)
    with_bias = PackedMatrix([rows.pack() for rows, _ in made], bias, bits)
    for n in (1, 6):
        x = torch.randn(n, 256)
        apart = torch.cat([native.product(x, PackedMatrix([rows.pack()], None, bits)) for rows, _ in made], 1)
        assert torch.equal(native.product(x, matrix), apart)
        assert torch.equal(native.product(x, with_bias), apart + bias)


@pytest.mark.parametrize("bits", [8, 16, 24])
def test_no_token_rows_have_no_products(bits: int) -> None:
    need_native()
    matrix = PackedMatrix([make("Q4_1", 131, 64)[0].pack()], None, bits)
    assert native.product(torch.randn(0, 64), matrix).shape == (0, 131)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind].halves])
def test_infinite_scales_are_found(kind: str) -> None:
    rows, _ = make(kind, 3, 512)
    for at in KINDS[kind].halves:
        data = rows.data.clone()
        data[1, at : at + 2] = torch.from_numpy(np.array([np.inf], dtype=np.float16).view(np.uint8))
        assert not QuantizedRows(kind, data).is_finite()


@pytest.mark.parametrize("bits", [8, 16, 24])
@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_so(bits: int, bad: float) -> None:
    """NaN is not the largest of its group by any comparison of numbers; it must not become an ordinary number."""
    need_native()
    values = torch.full((9, 96), 0.5)
    for kind in ("Q8_0", "Q4_1"):
        blocks = torch.full((9, 3, KINDS[kind].block_bytes), 0x31, dtype=torch.uint8)
        matrix = PackedMatrix([QuantizedRows(kind, blocks.flatten(1)).pack()], None, bits)
        for n in (1, 3, 13):
            x = torch.randn(n, values.shape[1])
            good = native.product(x, matrix)
            for row, column in ((0, 0), (n // 2, 33), (n - 1, 95)):
                spoilt = x.clone()
                spoilt[row, column] = bad
                got, others = native.product(spoilt, matrix), torch.arange(n) != row
                assert not got[row].isfinite().any() and torch.equal(got[others], good[others])


def test_the_smallest_numbers_count_for_zero() -> None:
    need_native()
    matrix, x = PackedMatrix([make("Q4_1", 9, 64)[0].pack()], None, 8), torch.randn(5, 64)
    zeros = x.clone()
    x[:, :32] *= 1e-41
    zeros[:, :32] = 0
    assert torch.equal(native.product(x, matrix), native.product(zeros, matrix))


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
    small, large = (PackedMatrix([make("Q4_1", outputs, 64)[0].pack()], None) for outputs in (8, 20000))
    small_seconds, large_seconds = quantized.product_seconds([small, large])
    assert 0 < small_seconds < large_seconds


@pytest.mark.parametrize(("bits", "finer"), [(8, 1), (16, 254)])
def test_rounded_activations_are_close(bits: int, finer: int) -> None:
    x = torch.randn(3, 96)
    steps = x.view(3, 3, 32).abs().amax(-1, keepdim=True) / 127 / finer
    assert ((round_activations(x, bits) - x).view(3, 3, 32).abs() <= steps * (0.5001 if finer == 1 else 0.51)).all()


def test_the_error_of_rounding_does_not_hang_on_a_result_that_is_near_zero() -> None:
    """A gate has one output, and its one product with one token row may be near 0."""
    need_native()
    assert all(0 < rounding_error([make("Q8_0", 1, 96)[0].pack()], None, 8) < 0.05 for _ in range(40))
