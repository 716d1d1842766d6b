"""Conditions on the arguments of the C code. The table of operations checks them before a call, and the calls rely on
that.

The C code reads float32 through pointers and records no gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.kernels.sampling_keys import CountTable, SamplingKeys

# Limits of attention.c (MAX_DIM, MAX_TILE_ROWS); a head is also a whole number of the widest vectors.
MAX_HEAD_DIM = 512
MAX_GROUP = 64
HEAD_DIM_STEP = 16


def is_matrix(x: Tensor) -> bool:
    """Whether x is a matrix of float32 token rows, at any row stride."""
    return x.dtype is torch.float32 and x.is_cpu and x.dim() == 2 and x.stride(1) == 1 and not x.requires_grad


def is_vector(x: Tensor | None, width: int) -> bool:
    if x is None:
        return True
    return x.dtype is torch.float32 and x.is_cpu and x.dim() == 1 and x.shape[0] == width and x.stride(0) == 1


def is_index(x: Tensor) -> bool:
    return x.dtype is torch.int64 and x.is_cpu and x.is_contiguous()


def is_counts(x: Tensor) -> bool:
    return x.dtype in (torch.int32, torch.int64) and x.is_cpu and x.dim() == 1 and x.stride(0) == 1


def is_cache(cache: Tensor) -> bool:
    """Whether x is a float32 cache [pages, page_size, kv heads, dim] whose pages are contiguous, at any page stride."""
    if cache.dtype is not torch.float32 or not cache.is_cpu or cache.dim() != 4:
        return False
    _, _, heads, dim = cache.shape
    return bool(cache.stride()[1:] == (heads * dim, dim, 1))


def is_angles(table: Tensor, rotary_dim: int) -> bool:
    return is_matrix(table) and table.shape[1] in (rotary_dim // 2, rotary_dim)


def takes_rms_norm(x: Tensor, weight: Tensor, eps: float, rounding: int = 0) -> bool:
    return is_matrix(x) and is_vector(weight, x.shape[1])


def takes_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, rounding: int = 0) -> bool:
    return is_matrix(x) and is_matrix(residual) and residual.shape == x.shape and is_vector(weight, x.shape[1])


def takes_gated(gate_up: Tensor, rounding: int = 0) -> bool:
    return is_matrix(gate_up) and gate_up.shape[1] % 2 == 0


def takes_elements(x: Tensor, y: Tensor) -> bool:
    return is_matrix(x) and is_matrix(y) and x.shape[0] == y.shape[0] and y.shape[1] in (x.shape[1], 1)


def takes_logits(logits: Tensor, cap: float) -> bool:
    return is_matrix(logits) and logits.is_contiguous()


def takes_draw(logits: Tensor, row: Tensor, position: Tensor, keys: SamplingKeys, any_sampled: bool) -> bool:
    own = keys.seed, keys.sample_index, row, position
    return is_matrix(logits) and all(map(is_index, own)) and keys.temperature.stride(0) == 1


def takes_report(logits: Tensor, tokens: Tensor, num: int) -> bool:
    return is_matrix(logits) and is_index(tokens)


def takes_count_runs(row: Tensor, run: Tensor, run_len: Tensor, counts: CountTable) -> bool:
    return is_index(row) and is_index(run) and is_index(run_len)


def takes_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether the C code reads this weight: float32, or bfloat16 that stands for the float32 numbers of the same
    value."""
    return (
        is_matrix(x) and weight.dtype in (torch.float32, torch.bfloat16) and weight.is_cpu and weight.stride(1) == 1
        and weight.shape[1] == x.shape[1] and is_vector(bias, weight.shape[0])
    )


def takes_find_ngram(tokens: Tensor, known: Tensor, rows: Tensor, *_: int) -> bool:
    return all(t.is_cpu and t.dtype is torch.int64 and t.stride(-1) == 1 for t in (tokens, known, rows))


def takes_rope(positions: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor,
               q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float = 0.0,
               rotary_dim: int | None = None) -> bool:
    dim = k_cache.shape[3]
    rotary = rotary_dim or dim
    return (
        is_cache(k_cache) and is_cache(v_cache) and is_index(positions) and is_index(slots)
        and is_vector(q_norm, dim) and is_vector(k_norm, dim)
        and is_angles(cos, rotary) and is_angles(sin, rotary) and cos.shape == sin.shape
    )


def takes_rope_write(qkv: Tensor, *rope: Tensor) -> bool:
    return is_matrix(qkv) and takes_rope(*rope)


def takes_requests(page_table: Tensor, query_starts: Tensor, lengths: Tensor, live: Tensor,
                   key_starts: Tensor | None) -> bool:
    return (
        page_table.dtype in (torch.int32, torch.int64) and page_table.is_cpu and page_table.stride(1) == 1
        and is_counts(query_starts) and is_counts(lengths) and is_counts(live)
        and (key_starts is None or is_counts(key_starts))
    )


def takes_heads(heads: int, kv_heads: int, dim: int) -> bool:
    """Whether the C code's attention serves this number of heads and this head size."""
    return dim % HEAD_DIM_STEP == 0 and dim <= MAX_HEAD_DIM and heads <= MAX_GROUP * kv_heads


def takes_paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, query_starts: Tensor,
                          lengths: Tensor, live: Tensor, scale: float, window: int = 0, softcap: float = 0.0,
                          key_starts: Tensor | None = None, sinks: Tensor | None = None,
                          is_chunked: bool = False) -> bool:
    _, heads, dim = q.shape
    return (sinks is None or (sinks.dtype is torch.float32 and sinks.is_cpu and sinks.is_contiguous())) and (
        q.dtype is torch.float32 and q.is_cpu and q.stride()[1:] == (dim, 1) and not q.requires_grad
        and takes_heads(heads, k_cache.shape[2], dim) and is_cache(k_cache) and is_cache(v_cache)
        and takes_requests(page_table, query_starts, lengths, live, key_starts)
    )
