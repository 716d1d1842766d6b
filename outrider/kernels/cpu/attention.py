"""Paged attention by the C code, and the kernel before it: norms of heads, rope and the cache write.

`checks.py` says which arguments are allowed; they are passed as the structs of `structures.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from outrider.kernels.cpu.build import library
from outrider.kernels.cpu.checks import takes_requests
from outrider.kernels.cpu.structures import ATTENTION, CACHE, REQUESTS, ROPE

_ERRORS = {
    1: "query starts, lengths and live counts do not fit each other",
    2: "a page table is too short for its length, or names a page that does not exist",
    3: "out of memory",
}


class RopeWrite(NamedTuple):
    """The arguments of `rope_write`, except the token rows."""

    positions: Tensor
    cos: Tensor
    sin: Tensor
    slots: Tensor
    k_cache: Tensor
    v_cache: Tensor
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 1e-6
    rotary_dim: int | None = None

    def pack(self, tokens: int, width: int, cache: bytes) -> bytes:
        """Return the bytes of the C struct of `rope_write`'s arguments. tokens, width: the shape of `qkv`, the rows of
        queries, keys and values. cache: the bytes of the C struct of the two caches (`pack_cache`)."""
        positions, cos, sin, slots, k_cache, v_cache, q_norm, k_norm, eps, rotary_dim = self
        kv_heads, dim = k_cache.shape[2:]
        assert v_cache.shape == k_cache.shape, "keys and values have caches of one shape"
        assert positions.shape == slots.shape == (tokens,), "one position and one slot per token row"
        rotary = rotary_dim or dim
        heads = width // dim - 2 * kv_heads
        assert heads > 0 and width % dim == 0, f"qkv has {width} columns for heads of {dim}"
        return ROPE.pack(
            cache=cache, cos=cos.data_ptr(), sin=sin.data_ptr(), positions=positions.data_ptr(),
            slots=slots.data_ptr(), cos_stride=cos.stride(0), sin_stride=sin.stride(0), max_len=cos.shape[0],
            rotary=rotary, second=cos.shape[1] - rotary // 2, heads=heads, q_norm=_pointer(q_norm),
            k_norm=_pointer(k_norm), eps=eps,
        )


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
    rotary_dim: int | None = None,
) -> None:
    tokens, width = qkv.shape
    rope = RopeWrite(positions, cos, sin, slots, k_cache, v_cache, q_norm, k_norm, eps, rotary_dim)
    packed = rope.pack(tokens, width, pack_cache(k_cache, v_cache))
    check_rows(library().rope_write(qkv.data_ptr(), qkv.stride(0), tokens, packed, torch.get_num_threads()))


def check_rows(num_bad: int) -> None:
    if num_bad:
        raise IndexError(f"rope_write: {num_bad} token rows have a position or slot outside the tables or the cache. "
                         "This is a bug: please report it")


class Requests:
    """The requests of a step as the C code reads them: page table, query starts, lengths, live counts and first keys.

    Made once for all layers that share a page table. Keeps the tensors alive.
    """

    def __init__(self, page_table: Tensor, query_starts: Tensor, lengths: Tensor, live: Tensor,
                 key_starts: Tensor | None = None) -> None:
        count = page_table.shape[0]
        rows = (count, lengths.shape[0], live.shape[0], query_starts.shape[0] - 1)
        assert rows == (count,) * 4, f"rows of table, lengths, live counts and query starts differ: {rows}"
        assert key_starts is None or key_starts.shape == (count,), "one first key per request"
        key_starts = None if key_starts is None else key_starts.long()
        self._owners = page_table, query_starts, lengths, live, key_starts
        self.packed = REQUESTS.pack(
            page_table=page_table.data_ptr(), query_starts=query_starts.data_ptr(), lengths=lengths.data_ptr(),
            live=live.data_ptr(), key_starts=_pointer(key_starts), table_stride=page_table.stride(0),
            table_width=page_table.shape[1], count=count, wide_table=page_table.dtype is torch.int64,
            wide_starts=query_starts.dtype is torch.int64, wide_lengths=lengths.dtype is torch.int64,
            wide_live=live.dtype is torch.int64,
        )


def make_requests(page_table: Tensor, query_starts: Tensor, lengths: Tensor, live: Tensor,
                  key_starts: Tensor | None = None) -> Requests | None:
    """Pack the requests of a step. Returns None if the C code does not take these tensors."""
    tensors = page_table, query_starts, lengths, live, key_starts
    return Requests(*tensors) if takes_requests(*tensors) else None


class Attention(NamedTuple):
    """The arguments of attention, except the queries and the cache."""

    requests: Requests
    scale: float
    window: int = 0  # 0: all keys
    softcap: float = 0.0  # 0: none
    sinks: Tensor | None = None
    is_chunked: bool = False  # the window begins at a multiple of its size

    def pack(self, q: int, q_stride: int, out: int, tokens: int, heads: int, cache: bytes) -> bytes:
        """Return the bytes of the C struct of `paged_attention`'s arguments. q, out: addresses of the queries and the
        output. cache: the bytes of the C struct of the two caches (`pack_cache`)."""
        return ATTENTION.pack(
            requests=self.requests.packed, cache=cache, q=q, out=out, q_stride=q_stride, tokens=tokens, heads=heads,
            window=self.window, scale=self.scale, softcap=self.softcap, sinks=_pointer(self.sinks),
            chunked=self.is_chunked,
        )


def pack_cache(k_cache: Tensor, v_cache: Tensor) -> bytes:
    num_pages, page_size, kv_heads, dim = k_cache.shape
    return CACHE.pack(
        k=k_cache.data_ptr(), v=v_cache.data_ptr(), k_stride=k_cache.stride(0), v_stride=v_cache.stride(0),
        num_pages=num_pages, page_size=page_size, kv_heads=kv_heads, dim=dim,
    )


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
    key_starts: Tensor | None = None,
    sinks: Tensor | None = None,
    is_chunked: bool = False,
) -> Tensor:
    requests = Requests(page_table, query_starts, lengths, live, key_starts)
    attention = Attention(requests, scale, window, softcap, sinks, is_chunked)
    tokens, heads, dim = q.shape
    assert k_cache.shape == v_cache.shape and k_cache.shape[3] == dim and heads % k_cache.shape[2] == 0
    assert sinks is None or sinks.shape == (heads,), "one sink per head"
    out = torch.empty(tokens, heads, dim)
    packed = attention.pack(q.data_ptr(), q.stride(0), out.data_ptr(), tokens, heads, pack_cache(k_cache, v_cache))
    check_attention(library().paged_attention(packed, torch.get_num_threads()))
    return out


def check_attention(error: int) -> None:
    if error:
        raise IndexError(f"paged_attention: {_ERRORS[error]}")


def _pointer(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
