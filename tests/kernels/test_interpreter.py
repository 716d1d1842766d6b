"""The quick parts of the interpreter give what its own give, and its products of tiles are left to no BLAS. A process
with a card has no interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")
import triton
import triton.language as tl

NUMBERS = [tl.int1, tl.int8, tl.uint8, tl.int16, tl.uint16, tl.int32, tl.uint32, tl.int64, tl.uint64,
           tl.float16, tl.bfloat16, tl.float32, tl.float64, tl.float8e4nv, tl.float8e5]
SHAPES = [(16,), (8, 4), (4, 2, 8)]


@triton.jit
def first_greatest(value, index, other, other_index):
    """Depends on the order of the two unless all is right: of equal values, the first one's index."""
    is_other = other > value
    return tl.where(is_other, other, value), tl.where(is_other, other_index, index)


@triton.jit
def greater(value, other):
    return tl.maximum(value, other)


@pytest.fixture(autouse=True)
def _interpreted(device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("kernels are compiled for the card")


def tensors(shape: tuple[int, ...], seed: int) -> tuple[Any, Any]:
    """Values with ties, and numbers of places."""
    from triton.runtime.interpreter import TensorHandle

    size = int(np.prod(shape))
    values = np.random.default_rng(seed).integers(0, size // 4, shape).astype(np.float32)
    places = np.arange(size, dtype=np.int32).reshape(shape)
    return tuple(tl.tensor(TensorHandle(data, dtype), tl.block_type(dtype, list(shape)))
                 for data, dtype in ((values, tl.float32), (places, tl.int32)))


# The interpreter's own, if not along an axis, take a single input and lose all dimensions but one.
@pytest.mark.parametrize(("shape", "axis", "keep_dims"), [
    *((shape, axis, keep_dims) for shape in SHAPES for axis in range(len(shape)) for keep_dims in (False, True)),
    *((shape, None, False) for shape in SHAPES)])
def test_reductions(shape: tuple[int, ...], axis: int | None, keep_dims: bool) -> None:
    from tests.kernels.interpreter import interpreter, plain_reduce

    for function, num_inputs in ((greater, 1), *([] if axis is None else [(first_greatest, 2)])):
        inputs = tensors(shape, seed=axis or 0)[:num_inputs]
        operation = interpreter.ReduceOps(axis, function, keep_dims)
        for quick, plain in zip(operation.generic_reduce(inputs), plain_reduce(operation, inputs), strict=True):
            assert quick.type == plain.type and quick.handle.dtype == plain.handle.dtype
            assert quick.handle.data.dtype == plain.handle.data.dtype
            assert np.array_equal(quick.handle.data, plain.handle.data)


@pytest.mark.parametrize("number", NUMBERS, ids=str)
def test_types(number: tl.dtype) -> None:
    from tests.kernels.interpreter import np_dtype, plain_np_dtype

    pointer = tl.pointer_type(number)
    for dtype in (number, pointer, tl.block_type(number, [4, 8]), tl.block_type(pointer, [4])):
        assert np_dtype(dtype) == plain_np_dtype(dtype), dtype
    block = tl.block_type(number, [4, 8])
    assert block == tl.block_type(number, [tl.constexpr(4), 8]) and list(block.shape) == [4, 8] and block.numel == 32
    for other in (tl.block_type(number, [8, 4]), tl.block_type(number, [32]), tl.block_type(pointer, [4, 8]), number):
        assert block != other
    assert all((block == tl.block_type(other, [4, 8])) == (number == other) for other in NUMBERS)
    assert block.with_element_ty(tl.int32) == tl.block_type(tl.int32, [4, 8])
    assert block.with_element_ty(pointer).element_ty == pointer


def test_a_shape_that_is_refused_stays_refused() -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="power of 2"):
            tl.block_type(tl.int32, [3])


def test_shapes_are_compared_by_value() -> None:
    shape = tl.block_type(tl.int32, [4, 8]).shape
    for other in ([4, 8], (4, 8), tl.tuple([4, 8]), [tl.constexpr(4), 8]):
        assert shape == other and not shape != other
    for other in ([8, 4], [4], [4, 8, 1], tl.tuple([4])):
        assert shape != other and not shape == other


def float32_tile(data: np.ndarray) -> Any:
    from triton.runtime.interpreter import TensorHandle

    return TensorHandle(data, tl.float32)


def test_products_of_tiles_have_the_same_bits_in_tiles_of_any_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """One chain over groups of 16 columns, whatever the tile has beside them: more rows, more outputs, columns of
    zeros, or its operands the other way around. BLAS would choose another order by the shape on some CPUs."""
    from tests.kernels.interpreter import interpreter

    rng = np.random.default_rng(0)
    a, b, d = (rng.standard_normal(shape).astype(np.float32) for shape in ((64, 128), (128, 32), (64, 32)))
    monkeypatch.setattr(np, "matmul", None)

    def product(a: np.ndarray, b: np.ndarray, d: np.ndarray) -> np.ndarray:
        builder = interpreter.interpreter_builder
        return builder.create_dot(float32_tile(a), float32_tile(b), float32_tile(d), None, 0).data

    whole = product(a, b, d)
    np.testing.assert_allclose(whole, a.astype(np.float64) @ b + d, rtol=1e-4, atol=1e-5)
    assert np.array_equal(product(a[:16], b[:, :16], d[:16, :16]), whole[:16, :16])
    assert np.array_equal(product(b.T, a.T, d.T), whole.T)
    halves = product(a[:, 64:], b[64:], product(a[:, :64], b[:64], d))
    assert np.array_equal(halves, whole)
    padded = product(np.pad(a, ((0, 0), (0, 128))), np.pad(b, ((0, 128), (0, 0))), d)
    assert np.array_equal(padded, whole)
