"""Triton's interpreter, with the same results in a part of the time: types, shapes and tables that it makes anew for
each operation are made once, and what it computes and throws away is left out.

Products of tiles alone have other results. The interpreter leaves them to numpy's BLAS, which adds in an order that
depends on the tile's shape and on the CPU. A tensor core adds the same columns in the same order in a tile of any
shape, and so does `dot`, which lets tests compare the bits of different tiles.

It is changed for good, for a process that compiles nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

plain_np_dtype = interpreter._get_np_dtype
plain_convert_float = interpreter._convert_float
plain_binary_op = interpreter.InterpreterBuilder.binary_op
plain_reduce = interpreter.ReduceOps.generic_reduce
plain_init_block_type = tl.block_type.__init__
plain_equal_types = tl.dtype.__eq__
plain_equal_tuples = tl.tuple.__eq__
plain_unwrap = tl.core._unwrap_if_constexpr
plain_broadcast = TritonSemantic.broadcast_impl_value
NEVER_WRAPPED = frozenset({tl.tensor, tl.dtype, tl.block_type, tl.pointer_type, int, float, bool})
TORCH_DTYPES = {tl.float16: torch.float16, tl.float32: torch.float32}
DOT_COLUMNS = 16  # columns that a tensor core multiplies and adds up at once
block_types: dict[tuple[Any, ...], tl.block_type] = {}


def convert_float(values: np.ndarray, from_dtype: Any, to_dtype: Any, rounding_mode: Any) -> np.ndarray:
    """To and from fp8 by torch: the interpreter's own rounding loses the carry out of the fraction, and NaN becomes a
    number."""
    if from_dtype == tl.float8e4nv and to_dtype in TORCH_DTYPES:
        numbers = torch.from_numpy(np.ascontiguousarray(values).view(np.uint8)).view(torch.float8_e4m3fn)
        return numbers.to(TORCH_DTYPES[to_dtype]).numpy().reshape(values.shape)
    if from_dtype != tl.float32 or to_dtype != tl.float8e4nv:
        return plain_convert_float(values, from_dtype, to_dtype, rounding_mode)
    rounded = torch.from_numpy(np.ascontiguousarray(values).view(np.float32)).to(torch.float8_e4m3fn)
    return rounded.view(torch.uint8).numpy().reshape(values.shape)


def binary_op(
    self: interpreter.InterpreterBuilder, left: interpreter.TensorHandle, right: interpreter.TensorHandle, op: Any
) -> interpreter.TensorHandle:
    """Truth values have the type int1. The interpreter's comparisons have the type of what they compare, so that a
    scalar which becomes a block is one of numbers, and Triton 3.9 takes no numbers for a mask."""
    result = plain_binary_op(self, left, right, op)
    if result.data.dtype == np.bool_:
        result.dtype = tl.int1
    return result


def make_quick() -> None:
    patch_language_once()
    # Whether integers overflow is computed with every operation, and looked at only in `debug`.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._get_np_dtype = np_dtype
    interpreter._convert_float = convert_float
    interpreter.ReduceOps.generic_reduce = reduce_by_halves
    interpreter.InterpreterBuilder.binary_op = binary_op
    interpreter.InterpreterBuilder.create_dot = dot
    TritonSemantic.broadcast_impl_value = broadcast
    tl.core._unwrap_if_constexpr = unwrap
    tl.tensor.__init__ = init_tensor
    tl.block_type.__new__ = new_block_type
    tl.block_type.__init__ = init_block_type
    tl.dtype.__eq__ = equal_types
    tl.tuple.__eq__ = equal_tuples


def patch_language_once() -> None:
    """The interpreter replaces every function of its language for each call of a function, and puts them back after."""
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    nothing_to_restore = interpreter._LangPatchScope()
    interpreter._patch_lang = lambda function: nothing_to_restore


def np_dtype(dtype: tl.dtype) -> np.dtype[Any]:
    """numpy's dtype of numbers, of pointers or of blocks of them."""
    scalar = dtype.scalar
    return plain_np_dtype(scalar) if scalar.is_ptr() else np_dtype_of(scalar)


np_dtype_of = functools.cache(plain_np_dtype)


def new_block_type(cls: type[tl.block_type], element: tl.dtype, shape: Any) -> tl.block_type:
    """One object for all blocks of the same numbers and shape. Of pointers it is a new one, as their types are."""
    if element.is_ptr() or cls is not tl.block_type:
        return object.__new__(cls)
    key = (element.name, *(n.__index__() for n in shape))
    made = block_types.get(key)
    if made is None:
        made = block_types[key] = object.__new__(cls)
    return made


def init_block_type(self: tl.block_type, element: tl.dtype, shape: Any) -> None:
    if "name" not in vars(self):
        plain_init_block_type(self, element, shape)


def init_tensor(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
    """Tensors of the same shape have the same object as their shape."""
    self.handle = handle
    self.type = type
    self.dtype = type.scalar
    self.shape, self.numel = shape_and_size(tuple(type.shape.values)) if type.is_block() else NO_SHAPE


@functools.cache
def shape_and_size(shape: tuple[int, ...]) -> tuple[tl.tuple, tl.constexpr]:
    return tl.tuple([tl.constexpr(n) for n in shape]), tl.constexpr(int(np.prod(shape, dtype=np.int64)))


NO_SHAPE = shape_and_size(())


def broadcast(self: TritonSemantic, left: tl.tensor, right: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    return (left, right) if left.shape is right.shape else plain_broadcast(self, left, right)


def unwrap(value: Any) -> Any:
    return value if type(value) in NEVER_WRAPPED else plain_unwrap(value)


def equal_types(self: tl.dtype, other: Any) -> bool:
    return self is other or plain_equal_types(self, other)


def equal_tuples(self: tl.tuple, other: Any) -> tl.constexpr:
    """A shape is compared with a list of integers; the plain function makes a tuple of the language of it first."""
    if type(other) is list and all(type(n) is int for n in other):
        return tl.constexpr(self.values == other)
    return plain_equal_tuples(self, other)


def reduce_by_halves(self: interpreter.ReduceOps, input: tuple[tl.tensor, ...]) -> list[tl.tensor]:
    """Neighbours in pairs, then pairs of pairs: all of them in one call of the function that combines two, which the
    interpreter calls for each number."""
    axis = 0 if self.axis is None else self.axis
    types = [block.dtype for block in input]
    blocks = [block.handle.data for block in input]
    ndim = blocks[0].ndim
    blocks = [np.moveaxis(data.reshape(-1) if self.axis is None else data, axis, 0) for data in blocks]
    while len(blocks[0]) > 1:
        pairs = [self.to_tensor(data[side::2], dtype)
                 for side in (0, 1) for data, dtype in zip(blocks, types, strict=True)]
        combined = self.combine_fn.fn(*pairs)
        blocks = [block.handle.data for block in (combined if isinstance(combined, tuple) else (combined,))]
    results = [data[0] for data in blocks]
    if self.keep_dims:
        results = [data.reshape((1,) * ndim) if self.axis is None else np.expand_dims(data, axis) for data in results]
    return [self.to_tensor(data, dtype) for data, dtype in zip(results, types, strict=True)]


def dot(
    self: interpreter.InterpreterBuilder, a: interpreter.TensorHandle, b: interpreter.TensorHandle,
    d: interpreter.TensorHandle, input_precision: Any, max_num_imprecise_acc: int,
) -> interpreter.TensorHandle:
    """a [.., m, k] times b [.., k, n], added to d. Every output is one chain of additions over groups of columns."""
    tiles = [a.data, b.data]
    if any(tile.dtype.primitive_bitwidth == 8 and tile.dtype.is_floating() for tile in (a, b)):
        tiles = [interpreter._convert_float(tile.data, tile.dtype, tl.float16, None).view(np.float16)
                 for tile in (a, b)]
    left, right = (data.astype(d.data.dtype, copy=False) for data in tiles)
    total = d.data
    for start in range(0, left.shape[-1], DOT_COLUMNS):
        columns = slice(start, start + DOT_COLUMNS)
        total = total + sum_by_halves(left[..., :, columns, None] * right[..., None, columns, :])
    return interpreter.TensorHandle(total, d.dtype.scalar)


def sum_by_halves(products: np.ndarray) -> np.ndarray:
    """[.., m, columns, n] -> [.., m, n]. Elementwise additions alone, so that no shape or CPU changes their order."""
    while products.shape[-2] > 1:
        products = products[..., 0::2, :] + products[..., 1::2, :]
    return products[..., 0, :]
