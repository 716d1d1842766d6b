"""Native CPU kernels: the C code of native*.c behind typed wrappers that check shapes, strides and types.

Every function has the contract of its twin in reference.py and hands over to it whatever the C code does not take:
other types or devices, unusual strides, gradients, no compiler, OUTRIDER_NATIVE=0. Knows no models.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.kernels import reference
from outrider.kernels.native.build import load as _load

# Limits of attention.c (MAX_DIM, MAX_TILE_ROWS); a head is also a whole number of the widest vectors.
MAX_HEAD_DIM = 512
MAX_GROUP = 64
HEAD_DIM_STEP = 16

# How native.h numbers the ways to store a weight.
FLOATS, HALVES, Q8_0, Q4_0, Q4_1 = range(5)

# The structs of native.h and native.c. Packing bytes is several times cheaper than a ctypes.Structure.
_MATRIX = struct.Struct("@PP qqqq")
_LAYER_END = struct.Struct("@PP fi")  # after the four matrices of a layer
_ROPE = struct.Struct("@PP PPPP qqqqq qqqqqqq PP ff")
_ATTENTION = struct.Struct("@PPPP qqq PPPPP qqqq qqqqqq ff iiii")
_ATTENTION_ERRORS = {
    1: "query starts, lengths and live counts do not fit each other",
    2: "a page table is too short for its length, or names a page that does not exist",
    3: "out of memory",
}


def available() -> bool:
    return _load()[0] is not None


def reason() -> str:
    """Why the native kernels are not available; empty if they are."""
    return _load()[1]


def _is_matrix(x: Tensor) -> bool:
    """Float32 token rows at any row stride. Gradients are not recorded here, so they go to the reference."""
    return x.dtype is torch.float32 and x.is_cpu and x.dim() == 2 and x.stride(1) == 1 and not x.requires_grad


def _is_vector(x: Tensor | None, width: int) -> bool:
    if x is None:
        return True
    return x.dtype is torch.float32 and x.is_cpu and x.dim() == 1 and x.shape[0] == width and x.stride(0) == 1


def _output(out: Tensor | None, *shape: int) -> Tensor | None:
    """A contiguous result tensor, or None if the caller's cannot be written directly."""
    if out is None:
        return torch.empty(shape)
    good = out.dtype is torch.float32 and out.is_cpu and out.shape == shape and out.is_contiguous()
    return out if good else None


def _pointer(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None, plus_one: bool = False) -> Tensor:
    lib = _load()[0]
    if lib is not None and _is_matrix(x) and _is_vector(weight, x.shape[1]):
        tokens, width = x.shape
        result = _output(out, tokens, width)
        if result is not None:
            lib.rms_norm(
                x.data_ptr(), x.stride(0), None, 0, weight.data_ptr(), result.data_ptr(), tokens, width, eps,
                float(plus_one), torch.get_num_threads(),
            )  # fmt: skip
            return result
    return reference.rms_norm(x, weight, eps, out, plus_one)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None, plus_one: bool = False
) -> tuple[Tensor, Tensor]:
    lib = _load()[0]
    if lib is not None and _is_matrix(x) and _is_matrix(residual) and _is_vector(weight, x.shape[1]):
        tokens, width = x.shape
        result = _output(out, tokens, width)
        if result is not None and residual.shape == x.shape:
            lib.rms_norm(
                x.data_ptr(), x.stride(0), residual.data_ptr(), residual.stride(0), weight.data_ptr(),
                result.data_ptr(), tokens, width, eps, float(plus_one), torch.get_num_threads(),
            )  # fmt: skip
            return result, residual
    return reference.add_rms_norm(x, residual, weight, eps, out, plus_one)


def _gated(gate_up: Tensor, out: Tensor | None, gelu: bool) -> Tensor | None:
    lib = _load()[0]
    if lib is None or not _is_matrix(gate_up) or gate_up.shape[1] % 2:
        return None
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    result = _output(out, tokens, width)
    if result is not None:
        lib.gated(
            gate_up.data_ptr(), gate_up.stride(0), result.data_ptr(), tokens, width, gelu, torch.get_num_threads()
        )
    return result


def silu_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    result = _gated(gate_up, out, gelu=False)
    return reference.silu_mul(gate_up, out) if result is None else result


def gelu_tanh_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    result = _gated(gate_up, out, gelu=True)
    return reference.gelu_tanh_mul(gate_up, out) if result is None else result


def _is_cache(cache: Tensor) -> bool:
    """[pages, page_size, kv heads, dim] float32, contiguous within a page, pages at any distance."""
    if cache.dtype is not torch.float32 or not cache.is_cpu or cache.dim() != 4:
        return False
    _, _, heads, dim = cache.shape
    return bool(cache.stride()[1:] == (heads * dim, dim, 1))


def _is_index(x: Tensor) -> bool:
    return x.dtype is torch.int64 and x.is_cpu and x.is_contiguous()


def _is_table(table: Tensor, rotary_dim: int) -> bool:
    return _is_matrix(table) and table.shape[1] in (rotary_dim // 2, rotary_dim)


class RopeWrite(NamedTuple):
    """Everything `rope_write` needs but the token rows."""

    positions: Tensor
    cos: Tensor
    sin: Tensor
    slots: Tensor
    k_cache: Tensor
    v_cache: Tensor
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 1e-6
    plus_one: bool = False
    rotary_dim: int | None = None

    def settings(self, tokens: int, width: int) -> bytes | None:
        """For [tokens, width]; None if the C code does not take this."""
        positions, cos, sin, slots, k_cache, v_cache, q_norm, k_norm, eps, plus_one, rotary_dim = self
        num_pages, page_size, kv_heads, dim = k_cache.shape
        assert v_cache.shape == k_cache.shape, "keys and values have caches of one shape"
        assert positions.shape == slots.shape == (tokens,), "one position and one slot per token row"
        rotary = rotary_dim or dim
        if (
            not (_is_cache(k_cache) and _is_cache(v_cache))
            or not (_is_index(positions) and _is_index(slots) and _is_vector(q_norm, dim) and _is_vector(k_norm, dim))
            or not (_is_table(cos, rotary) and _is_table(sin, rotary) and cos.shape == sin.shape)
        ):
            return None
        heads = width // dim - 2 * kv_heads
        assert heads > 0 and width % dim == 0, f"qkv has {width} columns for heads of {dim}"
        return _ROPE.pack(
            cos.data_ptr(), sin.data_ptr(), positions.data_ptr(), slots.data_ptr(), k_cache.data_ptr(),
            v_cache.data_ptr(), cos.stride(0), sin.stride(0), cos.shape[0], rotary, cos.shape[1] - rotary // 2, heads,
            kv_heads, dim, page_size, num_pages, k_cache.stride(0), v_cache.stride(0), _pointer(q_norm),
            _pointer(k_norm), eps, float(plus_one),
        )  # fmt: skip


def rope_write(
    qkv: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    plus_one: bool = False,
    rotary_dim: int | None = None,
) -> None:
    rope = RopeWrite(positions, cos, sin, slots, k_cache, v_cache, q_norm, k_norm, eps, plus_one, rotary_dim)
    settings = rope.settings(*qkv.shape)
    lib = _load()[0]
    if lib is None or settings is None or not _is_matrix(qkv):
        return reference.rope_write(qkv, *rope)
    bad = lib.rope_write(qkv.data_ptr(), qkv.stride(0), qkv.shape[0], settings, torch.get_num_threads())
    if bad:
        raise IndexError(_bad_rows(bad))
    return None


def _bad_rows(count: int) -> str:
    return f"rope_write: {count} token rows have a position or slot outside the tables or the cache"


def _is_counts(x: Tensor) -> bool:
    return x.dtype in (torch.int32, torch.int64) and x.is_cpu and x.dim() == 1 and x.stride(0) == 1


class Attention(NamedTuple):
    """Everything `paged_attention` needs but the queries and the cache."""

    page_table: Tensor
    query_starts: Tensor
    lengths: Tensor
    live: Tensor
    scale: float
    window: int = 0
    softcap: float = 0.0
    key_starts: Tensor | None = None

    def check(self) -> None:
        requests = self.page_table.shape[0]
        rows = (requests, self.lengths.shape[0], self.live.shape[0], self.query_starts.shape[0] - 1)
        assert rows == (requests,) * 4, f"rows of table, lengths, live counts and query starts differ: {rows}"
        assert self.key_starts is None or self.key_starts.shape == (requests,), "one first key per request"

    def takes(self, heads: int, k_cache: Tensor, v_cache: Tensor) -> bool:
        """Whether the C code serves this with so many heads and this cache."""
        dim = k_cache.shape[3]
        return (
            dim % HEAD_DIM_STEP == 0
            and dim <= MAX_HEAD_DIM
            and heads <= MAX_GROUP * k_cache.shape[2]
            and _is_cache(k_cache)
            and _is_cache(v_cache)
            and self.page_table.dtype in (torch.int32, torch.int64)
            and self.page_table.stride(1) == 1
            and all(map(_is_counts, (self.query_starts, self.lengths, self.live)))
            and (self.key_starts is None or _is_index(self.key_starts))
        )

    def settings(
        self, q: int, q_stride: int, out: int, tokens: int, heads: int, k_cache: Tensor, v_cache: Tensor
    ) -> bytes:
        """Queries and output are given by their addresses."""
        table, starts, lengths, live, scale, window, softcap, key_starts = self
        num_pages, page_size, kv_heads, dim = k_cache.shape
        return _ATTENTION.pack(
            q, k_cache.data_ptr(), v_cache.data_ptr(), out, q_stride, k_cache.stride(0), v_cache.stride(0),
            table.data_ptr(), starts.data_ptr(), lengths.data_ptr(), live.data_ptr(), _pointer(key_starts),
            table.stride(0), table.shape[1], num_pages, page_size, tokens, table.shape[0], heads, kv_heads, dim,
            window, scale, softcap, table.dtype is torch.int64, starts.dtype is torch.int64,
            lengths.dtype is torch.int64, live.dtype is torch.int64,
        )  # fmt: skip


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    live: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    out: Tensor | None = None,
    key_starts: Tensor | None = None,
) -> Tensor:
    if key_starts is not None and not _is_index(key_starts):
        key_starts = key_starts.long().contiguous()
    attention = Attention(page_table, query_starts, lengths, live, scale, window, softcap, key_starts)
    attention.check()
    tokens, heads, dim = q.shape
    assert k_cache.shape == v_cache.shape and k_cache.shape[3] == dim and heads % k_cache.shape[2] == 0
    lib = _load()[0]
    is_rows = q.dtype is torch.float32 and q.is_cpu and q.stride()[1:] == (dim, 1)
    result = None
    if lib is not None and is_rows and attention.takes(heads, k_cache, v_cache):
        result = _output(out, tokens, heads, dim)
    if lib is None or result is None:
        arguments = (q, k_cache, v_cache, page_table, query_starts, lengths, live, scale, window, softcap, out)
        return reference.paged_attention(*arguments, key_starts)
    settings = attention.settings(q.data_ptr(), q.stride(0), result.data_ptr(), tokens, heads, k_cache, v_cache)
    error = lib.paged_attention(settings, torch.get_num_threads())
    if error:
        raise IndexError(f"paged_attention: {_ATTENTION_ERRORS[error]}")
    return result


class Matrix:
    """A weight [outputs, inputs] and perhaps a bias, as the C code reads them. Keeps both alive."""

    def __init__(self, data: Tensor, bias: Tensor | None, kind: int, inputs: int) -> None:
        self.data, self.bias, self.kind = data, bias, kind
        self.outputs, self.inputs = data.shape[0], inputs
        row_bytes = data.stride(0) * data.element_size()
        self.packed = _MATRIX.pack(data.data_ptr(), _pointer(bias), row_bytes, inputs, self.outputs, kind)


def dense_matrix(weight: Tensor, bias: Tensor | None = None) -> Matrix | None:
    """Of float32, or of bfloat16 that stands for the same float32 numbers; None for what the C code does not take."""
    outputs, inputs = weight.shape
    kinds = {torch.float32: FLOATS, torch.bfloat16: HALVES}
    is_good = weight.dtype in kinds and weight.is_cpu and weight.stride(1) == 1 and _is_vector(bias, outputs)
    return Matrix(weight, bias, kinds[weight.dtype], inputs) if is_good and available() else None


def product(x: Tensor, matrix: Matrix) -> Tensor:
    """x [tokens, inputs] float32, rows at any distance, times the matrix.

    The cost is nearly flat up to eight token rows, and rows do not depend on each other."""
    lib = _load()[0]
    assert lib is not None and _is_matrix(x) and x.shape[1] == matrix.inputs
    out = torch.empty(x.shape[0], matrix.outputs)
    lib.product(
        matrix.packed, x.data_ptr(), x.stride(0), out.data_ptr(), x.shape[0], torch.get_num_threads()
    )  # fmt: skip
    return out


def dequantize(matrix: Matrix, first: int, out: Tensor) -> None:
    """Weight rows [first, first + rows of out) as float32; the matrix is stored in blocks."""
    lib = _load()[0]
    assert lib is not None and matrix.kind > HALVES and first + out.shape[0] <= matrix.outputs
    assert out.is_contiguous() and out.dtype is torch.float32 and out.shape[1] == matrix.inputs
    lib.dequantize(matrix.packed, first, out.shape[0], out.data_ptr(), torch.get_num_threads())


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`product` with a weight as it comes: see `dense_matrix`."""
    matrix = dense_matrix(weight, bias)
    if matrix is None or not _is_matrix(x) or x.shape[1] != matrix.inputs:
        return reference.linear(x, weight.to(x.dtype), bias)
    return product(x, matrix)


class LayerWeights:
    """A decoder layer: norm, one product for q, k and v, attention, output; norm, gated MLP."""

    def __init__(
        self, input_norm: Tensor, mlp_norm: Tensor, eps: float, qkv: Matrix, out: Matrix, gate_up: Matrix,
        down: Matrix, *, gelu: bool, max_tokens: int,
    ) -> None:  # fmt: skip
        assert _is_vector(input_norm, qkv.inputs) and _is_vector(mlp_norm, qkv.inputs)
        assert qkv.inputs == out.outputs == gate_up.inputs == down.outputs and gate_up.outputs == 2 * down.inputs
        self.max_tokens = max_tokens  # where another product takes over, the layer is done in parts
        self.qkv, self.out = qkv, out
        self._owners = (input_norm, mlp_norm, gate_up, down)
        end = _LAYER_END.pack(input_norm.data_ptr(), mlp_norm.data_ptr(), eps, gelu)
        self.packed = b"".join([*(matrix.packed for matrix in (qkv, out, gate_up, down)), end])


def decoder_layer(
    layer: LayerWeights, delta: Tensor | None, residual: Tensor, rope: RopeWrite, attention: Attention
) -> Tensor | None:
    """residual += delta, then attention and MLP of it; returns what the MLP adds, in delta's memory.

    The bits are those of the operations one by one. None, with nothing done, if the C code does not take this.
    """
    tokens, hidden = residual.shape
    lib = _load()[0]
    if lib is None or tokens > layer.max_tokens or not (_is_matrix(residual) and residual.is_contiguous()):
        return None
    if delta is not None and not (_is_matrix(delta) and delta.is_contiguous() and delta.shape == residual.shape):
        return None
    attention.check()
    k_cache, v_cache = rope.k_cache, rope.v_cache
    heads = layer.out.inputs // k_cache.shape[3]
    rope_settings = rope.settings(tokens, layer.qkv.outputs)
    if rope_settings is None or not attention.takes(heads, k_cache, v_cache):
        return None
    result = torch.empty_like(residual) if delta is None else delta
    error = lib.decoder_layer(
        layer.packed, rope_settings, attention.settings(0, 0, 0, tokens, heads, k_cache, v_cache), result.data_ptr(),
        delta is not None, residual.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    if error:
        raise IndexError(_bad_rows(-error) if error < 0 else f"paged_attention: {_ATTENTION_ERRORS[error]}")
    return result


# Text


def find_ngram(tokens: Tensor, known: Tensor, rows: Tensor, width: int, most: int, min_n: int,
               max_n: int) -> tuple[Tensor, Tensor]:
    lib = _load()[0]
    is_plain = all(t.is_cpu and t.dtype is torch.int64 and t.stride(-1) == 1 for t in (tokens, known, rows))
    if lib is None or not is_plain:
        return reference.find_ngram(tokens, known, rows, width, most, min_n, max_n)
    requests, width = rows.shape[0], min(width, tokens.shape[1])
    drafts, counts = torch.empty(requests, most, dtype=torch.int64), torch.empty(requests, dtype=torch.int64)
    lib.find_ngram(tokens.data_ptr(), tokens.stride(0), known.data_ptr(), rows.data_ptr(), requests, width, most, min_n,
                   max_n, drafts.data_ptr(), counts.data_ptr())
    return drafts, counts
