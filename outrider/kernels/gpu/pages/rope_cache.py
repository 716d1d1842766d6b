"""Rotary embedding and cache write in one pass over a fused q, k, v projection, with optional norms of all three.

Each token row is [q heads | k heads | v heads]; [q | k] if values are the keys before their norm; [q] if the layer
reads another layer's cache; or without q if queries are made elsewhere. Queries are rotated into a new tensor. Keys are
rotated and written, with the values, to the token's slot; a slot of -1 writes nothing. Non-finite numbers are contained
as in `cache_write`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from outrider.kernels.fp8_cache import HeadScales
from outrider.kernels.gpu.common import (
    FLOATS,
    cdiv,
    next_power_of_two,
    pdl_options,
    release_dependents,
    require,
    require_tensor,
    uses_pdl,
    wait_for_inputs,
)
from outrider.kernels.gpu.launch.triton_kernel import kernel
from outrider.kernels.gpu.pages.cache_write import contained_values, zero_or_nan
from outrider.kernels.gpu.pages.fp8 import as_stored, check_cache_dtype

_HEADS = 8  # heads per program
_MANY_TOKENS = 1024  # from here on programs have twice as many, where no sum depends on the tile


@triton.jit
def _rotate(
    source, target, row, head, valid_head, store, scales, cos_sin, norm_weight, source_head_stride, target_head_stride,
    eps, values, D: tl.constexpr, ROT: tl.constexpr, HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr,
    HAS_NORM: tl.constexpr, IS_KEY: tl.constexpr,
):
    """Norm heads `head` of one token, each over its whole width; rotate the first ROT columns in halves; copy the rest.
    A key becomes NaN if anything in it is not finite, or in its head's values, which begin at `values`."""
    half = tl.arange(0, HALF_PAD)
    in_half = half < ROT // 2
    mask = valid_head[:, None] & in_half[None, :]
    at = source + (head * source_head_stride)[:, None] + half[None, :]
    low = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(at + ROT // 2, mask=mask, other=0.0).to(tl.float32)
    if D > ROT:
        rest_column = ROT + tl.arange(0, REST_PAD)
        rest_mask = valid_head[:, None] & (rest_column < D)[None, :]
        rest = tl.load(
            source + (head * source_head_stride)[:, None] + rest_column[None, :], mask=rest_mask, other=0.0
        ).to(tl.float32)
    if IS_KEY:
        at = values + (head * source_head_stride)[:, None] + half[None, :]
        zeros = zero_or_nan(tl.load(at, mask=mask, other=0.0)) + zero_or_nan(
            tl.load(at + ROT // 2, mask=mask, other=0.0)
        )
        if D > ROT:
            at = values + (head * source_head_stride)[:, None] + rest_column[None, :]
            rest_zeros = zero_or_nan(tl.load(at, mask=rest_mask, other=0.0))
    # Everything that is read is asked for before the first sum, which nothing is moved across.
    cos = tl.load(cos_sin + row * ROT + half, mask=in_half, other=0.0)[None, :]
    sin = tl.load(cos_sin + row * ROT + ROT // 2 + half, mask=in_half, other=0.0)[None, :]
    if HAS_NORM:
        low_gain = tl.load(norm_weight + half, mask=in_half, other=0.0).to(tl.float32)
        high_gain = tl.load(norm_weight + ROT // 2 + half, mask=in_half, other=0.0).to(tl.float32)
        square = tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)
        if D > ROT:
            rest_gain = tl.load(norm_weight + rest_column, mask=rest_column < D, other=0.0).to(tl.float32)
            square += tl.sum(rest * rest, axis=1)
        scale = tl.rsqrt(square / D + eps)[:, None]
        low *= scale * low_gain[None, :]
        high *= scale * high_gain[None, :]
        if D > ROT:
            rest *= scale * rest_gain[None, :]
    to = target + (head * target_head_stride)[:, None]
    dtype = source.dtype.element_ty
    first, second = (low * cos - high * sin).to(dtype), (high * cos + low * sin).to(dtype)
    if IS_KEY:
        mark = tl.sum(zeros + zero_or_nan(first) + zero_or_nan(second), axis=1)
        if D > ROT:
            mark += tl.sum(rest_zeros + zero_or_nan(rest.to(dtype)), axis=1)
            rest += mark[:, None]
        first += mark[:, None].to(dtype)
        second += mark[:, None].to(dtype)
    tl.store(to + half[None, :], as_stored(first, scales, head, valid_head, target), mask=mask & store)
    tl.store(to + ROT // 2 + half[None, :], as_stored(second, scales, head, valid_head, target), mask=mask & store)
    if D > ROT:
        rest = as_stored(rest.to(dtype), scales, head, valid_head, target)
        tl.store(to + rest_column[None, :], rest, mask=rest_mask & store)


@kernel(do_not_specialize_on_alignment=["positions", "slots", "k_scales", "v_scales"])
def _rope_cache_kernel(
    qkv, positions, slots, cos_sin, q_weight, k_weight, q_out, k_cache, v_cache, k_scales, v_scales, eps, max_len,
    qkv_stride, q_token_stride, q_head_stride, k_page_stride, k_token_stride, k_head_stride,
    v_page_stride, v_token_stride, v_head_stride,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, ROT: tl.constexpr,
    HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr, PAGE: tl.constexpr, HEADS: tl.constexpr,
    Q_NORM: tl.constexpr, K_NORM: tl.constexpr, V_NORM: tl.constexpr, V_FROM_K: tl.constexpr,
    PDL: tl.constexpr,
):
    release_dependents(PDL)
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    Q_PARTS: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    KV_PARTS: tl.constexpr = (KV_HEADS + HEADS - 1) // HEADS
    source = qkv + token * qkv_stride
    # Positions of padding rows may be anything: they must still stay inside the table.
    row = tl.minimum(tl.maximum(tl.load(positions + token), 0), max_len - 1)
    if part < Q_PARTS:
        head = part * HEADS + tl.arange(0, HEADS)
        _rotate(source, q_out + token * q_token_stride, row, head, head < Q_HEADS, True, k_scales, cos_sin, q_weight,
                D, q_head_stride, eps, source, D, ROT, HALF_PAD, REST_PAD, Q_NORM, False)
    else:
        slot = tl.load(slots + token)
        page = slot // PAGE
        offset = slot % PAGE
        keys = source + Q_HEADS * D
        values = keys if V_FROM_K else keys + KV_HEADS * D
        if part < Q_PARTS + KV_PARTS:
            head = (part - Q_PARTS) * HEADS + tl.arange(0, HEADS)
            target = k_cache + page * k_page_stride + offset * k_token_stride
            _rotate(keys, target, row, head, head < KV_HEADS, slot >= 0, k_scales, cos_sin, k_weight,
                    D, k_head_stride, eps, values, D, ROT, HALF_PAD, REST_PAD, K_NORM, True)
        else:
            head = (part - Q_PARTS - KV_PARTS) * HEADS + tl.arange(0, HEADS)
            dim = tl.arange(0, D_PAD)
            mask = (head < KV_HEADS)[:, None] & (dim < D)[None, :] & (slot >= 0)
            value = tl.load(values + (head * D)[:, None] + dim[None, :], mask=mask, other=0.0)
            if V_NORM:
                wide = value.to(tl.float32)
                value = (wide * tl.rsqrt(tl.sum(wide * wide, axis=1) / D + eps)[:, None]).to(qkv.dtype.element_ty)
            target = v_cache + page * v_page_stride + offset * v_token_stride
            value = as_stored(contained_values(value), v_scales, head, head < KV_HEADS, v_cache)
            tl.store(target + (head * v_head_stride)[:, None] + dim[None, :], value, mask=mask)


def rope_cache_write(
    qkv: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, slots: torch.Tensor,
    k_cache: torch.Tensor, v_cache: torch.Tensor,
    q_norm_weight: torch.Tensor | None = None, k_norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6, *, v_norm: bool = False, v_from_k: bool = False, writes: bool = True,
    scales: HeadScales | None = None, out: torch.Tensor | None = None, pdl: bool | None = None,
) -> torch.Tensor:
    """Rotate qkv [tokens, (heads + 2 * kv heads) * dim]: returns queries [tokens, heads, dim], and writes keys and
    values to their slots.

    cos_sin [max_len, rot_dim] float32: cosines in the first half of a row, sines in the second; columns past rot_dim of
    a head are not rotated. The slot of offset o in page p is p * page_size + o. v_norm divides values by their root
    mean square. v_from_k takes values from the keys' columns, before the keys' norm. Without `writes` only queries are
    computed.
    """
    name, device = "rope_cache_write", qkv.device
    pdl = uses_pdl(device) if pdl is None else pdl
    require_tensor(name, "qkv", qkv, (None, None), device, FLOATS)
    num_tokens = qkv.shape[0]
    check_cache_dtype(name, k_cache, v_cache, (None, None, None, None), qkv, scales)
    _, page_size, num_kv_heads, head_dim = k_cache.shape
    kv_columns = num_kv_heads * (0 if not writes else 1 if v_from_k else 2)
    num_heads = qkv.shape[1] // head_dim - kv_columns
    require(qkv.shape[1] == (num_heads + kv_columns) * head_dim and num_heads >= (0 if writes else 1), name, "qkv",
            f"has {qkv.shape[1]} columns, expected q heads plus {kv_columns} heads of {head_dim}")
    for argument, tensor in (("positions", positions), ("slots", slots)):
        require_tensor(name, argument, tensor, (num_tokens,), device, (torch.int64,))
    require_tensor(name, "cos_sin", cos_sin, (None, None), device, (torch.float32,), inner_contiguous=2)
    max_len, rot_dim = cos_sin.shape
    require(0 < rot_dim <= head_dim and rot_dim % 2 == 0, name, "cos_sin",
            f"has {rot_dim} columns, expected an even number up to {head_dim}")
    for argument, weight in (("q_norm_weight", q_norm_weight), ("k_norm_weight", k_norm_weight)):
        if weight is not None:
            require_tensor(name, argument, weight, (head_dim,), device, FLOATS)
    if out is None:
        out = torch.empty(num_tokens, num_heads, head_dim, dtype=qkv.dtype, device=device)
    else:
        require_tensor(name, "out", out, (num_tokens, num_heads, head_dim), device, (qkv.dtype,))
    if num_tokens == 0:
        return out
    has_norm = q_norm_weight is not None or k_norm_weight is not None or v_norm
    heads = 2 * _HEADS if num_tokens >= _MANY_TOKENS and head_dim <= 128 and not has_norm else _HEADS
    parts = cdiv(num_heads, heads) + (2 * cdiv(num_kv_heads, heads) if writes else 0)
    _rope_cache_kernel[(num_tokens, parts)](
        qkv, positions, slots, cos_sin, qkv if q_norm_weight is None else q_norm_weight,
        qkv if k_norm_weight is None else k_norm_weight, out if num_heads else qkv, k_cache, v_cache,
        *(scales or (cos_sin, cos_sin)), eps, max_len,
        qkv.stride(0), *out.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3],
        Q_HEADS=num_heads, KV_HEADS=num_kv_heads, D=head_dim, D_PAD=next_power_of_two(head_dim), ROT=rot_dim,
        HALF_PAD=next_power_of_two(rot_dim // 2), REST_PAD=next_power_of_two(max(1, head_dim - rot_dim)),
        PAGE=page_size, HEADS=heads, Q_NORM=q_norm_weight is not None, K_NORM=k_norm_weight is not None,
        V_NORM=v_norm, V_FROM_K=v_from_k, PDL=pdl, num_warps=4, **pdl_options(pdl),
    )
    return out
