"""Norms, ropes and cache writes of latent attention: one kernel after the compressing product, one for the queries.

Writes go to slots; a slot of -1 writes nothing. Numbers are rounded where the torch reference rounds them."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from outrider.kernels.fp8_cache import FP8
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
from outrider.kernels.gpu.pages.fp8 import latent_as_stored
from outrider.kernels.latent_inputs import LEAST_SCALE, MAX_FP8, IndexInputs, RopeRows

_HEADS = 8  # heads per program
_MAX_FP8, _LEAST_SCALE = tl.constexpr(MAX_FP8), tl.constexpr(LEAST_SCALE)
_INTS = ["positions", "slots", "request_of", "lengths", "starts"]


@triton.jit
def _angles(positions, table, token, max_len, half, in_half, ROT: tl.constexpr):
    """Load (cos, sin) of a token row's position. Positions of padding rows are arbitrary; they are clamped to the
    table."""
    position = tl.minimum(tl.maximum(tl.load(positions + token), 0), max_len - 1)
    cos = tl.load(table + position * ROT + half, mask=in_half, other=0.0)
    sin = tl.load(table + position * ROT + ROT // 2 + half, mask=in_half, other=0.0)
    return cos, sin


@triton.jit
def _pair_columns(half, FIRST: tl.constexpr, IN_PAIRS: tl.constexpr, ROT: tl.constexpr):
    """Return the two columns that rotate together, of ROT columns from FIRST on."""
    if IN_PAIRS:
        return FIRST + 2 * half, FIRST + 2 * half + 1
    else:
        return FIRST + half, FIRST + half + ROT // 2


@triton.jit
def _index_normed(source, gain, shift, column, inside, mean, spread, dtype: tl.constexpr):
    """Norm columns of the index key, and round them as if they had been stored."""
    value = (tl.load(source + column, mask=inside, other=0.0).to(tl.float32) - mean) * spread
    value *= tl.load(gain + column, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(shift + column, mask=inside, other=0.0).to(tl.float32)
    return value.to(dtype).to(tl.float32)


@triton.jit
def _write_latent(source, norm, cos, sin, half, in_half, to, slot, eps, L: tl.constexpr, L_PAD: tl.constexpr,
                  ROT: tl.constexpr, IN_PAIRS: tl.constexpr):
    """Write the normed latent, and the rotated key after it."""
    dtype = source.dtype.element_ty
    dim = tl.arange(0, L_PAD)
    value = tl.load(source + dim, mask=dim < L, other=0.0).to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, axis=0) / L + eps)
    value *= tl.load(norm + dim, mask=dim < L, other=0.0).to(tl.float32)
    tl.store(to + dim, latent_as_stored(value.to(dtype), to), mask=(dim < L) & (slot >= 0))
    low_column, high_column = _pair_columns(half, 0, IN_PAIRS, ROT)
    low = tl.load(source + L + low_column, mask=in_half, other=0.0).to(tl.float32)
    high = tl.load(source + L + high_column, mask=in_half, other=0.0).to(tl.float32)
    mask = in_half & (slot >= 0)
    tl.store(to + L + half, latent_as_stored((low * cos - high * sin).to(dtype), to), mask=mask)
    tl.store(to + L + ROT // 2 + half, latent_as_stored((high * cos + low * sin).to(dtype), to), mask=mask)


@triton.jit
def _fp8_scale(greatest):
    """The smallest power of two that, as a scale, makes numbers up to `greatest` fit into fp8, as in
    `kernels.latent_inputs.to_fp8`."""
    least = tl.maximum(greatest * (1 / _MAX_FP8), _LEAST_SCALE)
    bits = (least.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _write_index_key(source, norm, bias, cos, sin, half, in_half, to, to_scale, slot, eps, D: tl.constexpr,
                     D_PAD: tl.constexpr, ROT: tl.constexpr, FIRST: tl.constexpr, IN_PAIRS: tl.constexpr,
                     SCALED: tl.constexpr):
    dtype = source.dtype.element_ty
    dim = tl.arange(0, D_PAD)
    value = tl.load(source + dim, mask=dim < D, other=0.0).to(tl.float32)
    mean = tl.sum(value, axis=0) / D
    apart = tl.where(dim < D, value - mean, 0.0)
    spread = tl.rsqrt(tl.sum(apart * apart, axis=0) / D + eps)
    gain = tl.load(norm + dim, mask=dim < D, other=0.0).to(tl.float32)
    shift = tl.load(bias + dim, mask=dim < D, other=0.0).to(tl.float32)
    rest = (apart * spread * gain + shift).to(dtype)
    in_rest = (dim < D) & ((dim < FIRST) | (dim >= FIRST + ROT))
    to_rest = to + dim + (ROT if FIRST else 0)  # the columns that rotate come first
    low_column, high_column = _pair_columns(half, FIRST, IN_PAIRS, ROT)
    low = _index_normed(source, norm, bias, low_column, in_half, mean, spread, dtype)
    high = _index_normed(source, norm, bias, high_column, in_half, mean, spread, dtype)
    mask = in_half & (slot >= 0)
    first, second = (low * cos - high * sin).to(dtype), (high * cos + low * sin).to(dtype)
    if SCALED:
        turned = tl.maximum(tl.max(tl.abs(first.to(tl.float32)), axis=0), tl.max(tl.abs(second.to(tl.float32)), axis=0))
        passed = tl.max(tl.where(in_rest, tl.abs(rest.to(tl.float32)), 0.0), axis=0)
        scale = _fp8_scale(tl.maximum(turned, passed))
        tl.store(to_scale, scale, mask=slot >= 0)
        tl.store(to_rest, (rest.to(tl.float32) / scale).to(to.dtype.element_ty), mask=in_rest & (slot >= 0))
        tl.store(to + half, (first.to(tl.float32) / scale).to(to.dtype.element_ty), mask=mask)
        tl.store(to + ROT // 2 + half, (second.to(tl.float32) / scale).to(to.dtype.element_ty), mask=mask)
    else:
        tl.store(to_rest, rest, mask=in_rest & (slot >= 0))
        tl.store(to + half, first, mask=mask)
        tl.store(to + ROT // 2 + half, second, mask=mask)


@triton.jit
def _norm_q(source, norm, to, eps, Q: tl.constexpr, Q_PAD: tl.constexpr):
    dim = tl.arange(0, Q_PAD)
    value = tl.load(source + dim, mask=dim < Q, other=0.0).to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, axis=0) / Q + eps)
    value *= tl.load(norm + dim, mask=dim < Q, other=0.0).to(tl.float32)
    tl.store(to + dim, value.to(to.dtype.element_ty), mask=dim < Q)


@kernel(do_not_specialize_on_alignment=["positions", "slots"])
def _write_latents_kernel(
    compressed, q_norm, latent_norm, index_norm, index_bias, positions, table, slots, cache, index_cache, scales, q_out,
    weights_out, eps, index_eps, index_scale, max_len, in_stride, page_stride, entry_stride, index_page_stride,
    index_stride, scale_page_stride,
    Q: tl.constexpr, Q_PAD: tl.constexpr, L: tl.constexpr, L_PAD: tl.constexpr, ROT: tl.constexpr,
    HALF_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, HEADS: tl.constexpr, HEADS_PAD: tl.constexpr,
    PAGE: tl.constexpr, IN_PAIRS: tl.constexpr, INDEX_FIRST: tl.constexpr, INDEX_PAIRS: tl.constexpr,
    SCALED: tl.constexpr, PDL: tl.constexpr,
):
    """Each program writes one part of a token row: its latent; its index key with the head weights, if there is an
    indexer; or its q, if that is normed."""
    release_dependents(PDL)
    wait_for_inputs(PDL)
    INDEX_PART: tl.constexpr = 1 if D > 0 else -1
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source = compressed + token * in_stride
    slot = tl.load(slots + token).to(tl.int64)
    page, offset = slot // PAGE, slot % PAGE
    half = tl.arange(0, HALF_PAD)
    in_half = half < ROT // 2
    cos, sin = _angles(positions, table, token, max_len, half, in_half, ROT)
    if part == 0:
        to = cache + page * page_stride + offset * entry_stride
        _write_latent(source + Q, latent_norm, cos, sin, half, in_half, to, slot, eps, L, L_PAD, ROT, IN_PAIRS)
    elif part == INDEX_PART:
        source += Q + L + ROT
        to = index_cache + page * index_page_stride + offset * index_stride
        _write_index_key(source, index_norm, index_bias, cos, sin, half, in_half, to,
                         scales + page * scale_page_stride + offset, slot, index_eps, D, D_PAD, ROT, INDEX_FIRST,
                         INDEX_PAIRS, SCALED)
        head = tl.arange(0, HEADS_PAD)
        weight = tl.load(source + D + head, mask=head < HEADS, other=0.0).to(tl.float32)
        tl.store(weights_out + token * HEADS + head, weight * index_scale, mask=head < HEADS)
    else:
        _norm_q(source, q_norm, q_out + token * Q, eps, Q, Q_PAD)


def write_latents(
    compressed: torch.Tensor, q_norm: torch.Tensor | None, latent_norm: torch.Tensor, eps: float, rope: RopeRows,
    slots: torch.Tensor, cache: torch.Tensor, index: IndexInputs | None, *, pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm and rotate compressed vectors and write them to the cache; see `kernels.latent_inputs.write_latents` for the
    arguments."""
    name, device, dtype = "write_latents", compressed.device, compressed.dtype
    pdl = uses_pdl(device) if pdl is None else pdl
    require_tensor(name, "compressed", compressed, (None, None), device, FLOATS)
    num_tokens, q_size, latent = compressed.shape[0], 0 if q_norm is None else len(q_norm), len(latent_norm)
    rot, max_len = _check_rope(name, rope, num_tokens, device)
    require_tensor(name, "cache", cache, (None, None, latent + rot), device, (dtype, FP8))
    require_tensor(name, "slots", slots, (num_tokens,), device, (torch.int64,))
    index_dim, num_heads, keys = 0, 0, cache
    if index is not None:
        index_dim, num_heads, keys = index.cache.shape[2], index.num_heads, index.cache
    scales = None if index is None else index.scales
    stored = cache.dtype if index is None else dtype if scales is None else FP8
    require_tensor(name, "index cache", keys, (cache.shape[0], cache.shape[1], None), device, (stored,))
    if scales is not None:
        require_tensor(name, "scales", scales, (*keys.shape[:2], 1), device, (torch.float32,), inner_contiguous=2)
    width = q_size + latent + rot + index_dim + num_heads
    require(compressed.shape[1] == width, name, "compressed", f"has {compressed.shape[1]} columns, expected {width}")
    q_out = torch.empty(num_tokens, q_size, dtype=dtype, device=device)
    weights = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=device)
    if num_tokens == 0:
        return q_out, weights
    _write_latents_kernel[(num_tokens, 1 + bool(index_dim) + bool(q_size))](
        compressed, latent_norm if q_norm is None else q_norm, latent_norm,
        latent_norm if index is None else index.norm_weight, latent_norm if index is None else index.norm_bias,
        rope.positions, rope.table, slots, cache, keys, weights if scales is None else scales, q_out, weights, eps,
        eps if index is None else index.eps, 0.0 if index is None else index.scale, max_len, compressed.stride(0),
        cache.stride(0), cache.stride(1), keys.stride(0), keys.stride(1), 0 if scales is None else scales.stride(0),
        Q=q_size, Q_PAD=next_power_of_two(q_size), L=latent, L_PAD=next_power_of_two(latent), ROT=rot,
        HALF_PAD=next_power_of_two(rot // 2), D=index_dim, D_PAD=next_power_of_two(index_dim), HEADS=num_heads,
        HEADS_PAD=next_power_of_two(num_heads), PAGE=cache.shape[1], IN_PAIRS=rope.in_pairs,
        INDEX_FIRST=index_dim - rot if index_dim and rope.index_at_end else 0,
        INDEX_PAIRS=index is not None and index.in_pairs, SCALED=scales is not None, PDL=pdl, num_warps=4,
        **pdl_options(pdl),
    )
    return q_out, weights


@triton.jit
def _rotate_heads(
    source, target, head, exists, cos, sin, half, in_half, source_head_stride, target_head_stride,
    ROT: tl.constexpr, REST: tl.constexpr, REST_PAD: tl.constexpr, FIRST: tl.constexpr, IN_PAIRS: tl.constexpr,
):
    """Rotate ROT columns of some heads, from FIRST on. The other REST columns, before or after them, are copied behind
    the rotated ones."""
    low_column, high_column = _pair_columns(half, FIRST, IN_PAIRS, ROT)
    mask = exists[:, None] & in_half[None, :]
    at = source + head[:, None] * source_head_stride
    low = tl.load(at + low_column[None, :], mask=mask, other=0.0).to(tl.float32)
    high = tl.load(at + high_column[None, :], mask=mask, other=0.0).to(tl.float32)
    to = target + head[:, None] * target_head_stride
    dtype = target.dtype.element_ty
    tl.store(to + half[None, :], (low * cos[None, :] - high * sin[None, :]).to(dtype), mask=mask)
    tl.store(to + ROT // 2 + half[None, :], (high * cos[None, :] + low * sin[None, :]).to(dtype), mask=mask)
    if REST > 0:
        rest = tl.arange(0, REST_PAD)[None, :]
        mask = exists[:, None] & (rest < REST)
        passed = at + (0 if FIRST else ROT) + rest
        tl.store(to + ROT + rest, tl.load(passed, mask=mask, other=0.0), mask=mask)


@triton.jit
def rotate_part(
    queries, positions, table, q, index_q, token, part, max_len, in_stride, q_token_stride, q_head_stride,
    HEADS: tl.constexpr, NOPE: tl.constexpr, L: tl.constexpr, ROT: tl.constexpr, HALF_PAD: tl.constexpr,
    INDEX_HEADS: tl.constexpr, D: tl.constexpr, REST_PAD: tl.constexpr, IN_PAIRS: tl.constexpr,
    INDEX_FIRST: tl.constexpr, INDEX_PAIRS: tl.constexpr, BLOCK_H: tl.constexpr,
):
    """Rotate BLOCK_H heads of a token row. The indexer's heads are numbered after the attention's heads."""
    PARTS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    source = queries + token * in_stride
    half = tl.arange(0, HALF_PAD)
    in_half = half < ROT // 2
    cos, sin = _angles(positions, table, token, max_len, half, in_half, ROT)
    if part < PARTS:
        head = part * BLOCK_H + tl.arange(0, BLOCK_H)
        _rotate_heads(source + NOPE, q + token * q_token_stride + L, head, head < HEADS, cos, sin, half, in_half,
                      NOPE + ROT, q_head_stride, ROT, 0, 1, 0, IN_PAIRS)
    else:
        head = (part - PARTS) * BLOCK_H + tl.arange(0, BLOCK_H)
        _rotate_heads(source + HEADS * (NOPE + ROT), index_q + token * INDEX_HEADS * D, head, head < INDEX_HEADS, cos,
                      sin, half, in_half, D, D, ROT, D - ROT, REST_PAD, INDEX_FIRST, INDEX_PAIRS)


@kernel(do_not_specialize_on_alignment=["positions"])
def _rotate_queries_kernel(
    queries, positions, table, q, index_q, max_len, in_stride, q_token_stride, q_head_stride,
    HEADS: tl.constexpr, NOPE: tl.constexpr, L: tl.constexpr, ROT: tl.constexpr, HALF_PAD: tl.constexpr,
    INDEX_HEADS: tl.constexpr, D: tl.constexpr, REST_PAD: tl.constexpr, IN_PAIRS: tl.constexpr,
    INDEX_FIRST: tl.constexpr, INDEX_PAIRS: tl.constexpr, BLOCK_H: tl.constexpr, PDL: tl.constexpr,
):
    release_dependents(PDL)
    wait_for_inputs(PDL)
    rotate_part(queries, positions, table, q, index_q, tl.program_id(0).to(tl.int64), tl.program_id(1), max_len,
                in_stride, q_token_stride, q_head_stride, HEADS, NOPE, L, ROT, HALF_PAD, INDEX_HEADS, D, REST_PAD,
                IN_PAIRS, INDEX_FIRST, INDEX_PAIRS, BLOCK_H)


def rotate_queries(
    queries: torch.Tensor, rope: RopeRows, q: torch.Tensor, nope_dim: int, index_q: torch.Tensor | None,
    index_in_pairs: bool, *, pdl: bool | None = None,
) -> None:
    """Rotate the queries; see `kernels.latent_inputs.rotate_queries` for the arguments."""
    pdl = uses_pdl(queries.device) if pdl is None else pdl
    num_parts, args, options = rotation_launch("rotate_queries", queries, rope, q, nope_dim, index_q, index_in_pairs)
    if len(queries):
        _rotate_queries_kernel[(len(queries), num_parts)](*args, **options, PDL=pdl, num_warps=4, **pdl_options(pdl))


def rotation_launch(
    name: str, queries: torch.Tensor, rope: RopeRows, q: torch.Tensor, nope_dim: int, index_q: torch.Tensor | None,
    index_in_pairs: bool,
) -> tuple[int, tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a launch that calls `rotate_part`: (parts of a token row, arguments, compile-time
    arguments)."""
    device, dtype = queries.device, queries.dtype
    require_tensor(name, "queries", queries, (None, None), device, FLOATS)
    num_tokens, num_heads = queries.shape[0], q.shape[1]
    rot, max_len = _check_rope(name, rope, num_tokens, device)
    require_tensor(name, "q", q, (num_tokens, None, None), device, (dtype,))
    index_heads, index_dim = (0, rot) if index_q is None else index_q.shape[1:]
    if index_q is not None:
        require_tensor(name, "index_q", index_q, (num_tokens, None, None), device, (dtype,), inner_contiguous=3)
    width = num_heads * (nope_dim + rot) + index_heads * index_dim
    require(queries.shape[1] == width, name, "queries", f"has {queries.shape[1]} columns, expected {width}")
    parts = cdiv(num_heads, _HEADS) + cdiv(index_heads, _HEADS)
    args = (queries, rope.positions, rope.table, q, q if index_q is None else index_q, max_len, queries.stride(0),
            q.stride(0), q.stride(1))
    options = {"HEADS": num_heads, "NOPE": nope_dim, "L": q.shape[2] - rot, "ROT": rot,
               "HALF_PAD": next_power_of_two(rot // 2), "INDEX_HEADS": index_heads, "D": index_dim,
               "REST_PAD": next_power_of_two(max(1, index_dim - rot)), "IN_PAIRS": rope.in_pairs,
               "INDEX_FIRST": index_dim - rot if rope.index_at_end else 0, "INDEX_PAIRS": index_in_pairs,
               "BLOCK_H": _HEADS}
    return parts, args, options


@kernel(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=_INTS)
def _ranges_kernel(positions, slots, request_of, lengths, starts, first, stop, num_tokens, HAS_STARTS: tl.constexpr,
                   BLOCK: tl.constexpr, PDL: tl.constexpr):
    release_dependents(PDL)
    wait_for_inputs(PDL)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = token < num_tokens
    request = tl.load(request_of + token, mask=exists, other=0)
    begin = tl.zeros([BLOCK], dtype=tl.int64)
    if HAS_STARTS:
        begin = tl.load(starts + request, mask=exists, other=0)
    end = tl.minimum(tl.load(positions + token, mask=exists, other=0) + 1,
                     tl.load(lengths + request, mask=exists, other=0))
    is_live = tl.load(slots + token, mask=exists, other=-1) >= 0
    tl.store(first + token, begin, mask=exists)
    tl.store(stop + token, tl.where(is_live, end, 0), mask=exists)


def visible_ranges(
    positions: torch.Tensor, slots: torch.Tensor, request_of: torch.Tensor, lengths: torch.Tensor,
    starts: torch.Tensor | None, *, pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the positions that each token row sees; see `kernels.latent.visible_ranges` for the arguments."""
    name, device, int64 = "visible_ranges", positions.device, (torch.int64,)
    pdl = uses_pdl(device) if pdl is None else pdl
    for argument, tensor in (("positions", positions), ("slots", slots), ("request_of", request_of)):
        require_tensor(name, argument, tensor, (positions.shape[0],), device, int64)
    require_tensor(name, "lengths", lengths, (None,), device, int64)
    if starts is not None:
        require_tensor(name, "starts", starts, tuple(lengths.shape), device, int64)
    first, stop = torch.empty_like(positions), torch.empty_like(positions)
    if len(positions):
        _ranges_kernel[(cdiv(len(positions), 256),)](
            positions, slots, request_of, lengths, lengths if starts is None else starts, first, stop, len(positions),
            HAS_STARTS=starts is not None, BLOCK=256, PDL=pdl, num_warps=4, **pdl_options(pdl),
        )
    return first, stop


def _check_rope(name: str, rope: RopeRows, num_tokens: int, device: torch.device) -> tuple[int, int]:
    """Check the rope's tensors, and return (number of rotating columns, number of positions in the table)."""
    require_tensor(name, "positions", rope.positions, (num_tokens,), device, (torch.int64,))
    require_tensor(name, "table", rope.table, (None, None), device, (torch.float32,), inner_contiguous=2)
    max_len, rot = rope.table.shape
    return rot, max_len
