"""Parts of the kernels that write and read pages of fp8 numbers (e4m3): numbers are brought into fp8 when they are
written, and multiplied as float16 numbers when they are read.

Every number of fp8 is one of float16, and the card converts two at once, where bfloat16 would take five instructions.
float16 has a smaller range than bfloat16, so each query is multiplied by a power of two that brings its greatest number
near the end of that range, and its scores are divided by it again: numbers of a query keep their bits unless they are
2^-31 times as small as its greatest. Scales of heads are folded into scores and results.

Values of tiles with few rows are loaded in pairs of neighbours, as numbers of 16 bits, of which each half is multiplied
by itself. Matrix instructions take values with the keys as the inner dimension, in which pages do not lie, and the card
turns tiles of 16 bits around as it loads them from shared memory, but tiles of 8 bits only one number at a time.
Tiles of 64 rows and more are multiplied by instructions of whole warp groups, which read values from shared memory as
float16 numbers: pairs would only double the instructions. With heads of 64 they did harm, too: halves of 32 columns
have other descriptors than keys of 64, and the assembler of CUDA 12.8, which comes with Triton, loses the address of
one of two kinds of descriptors that begin at the same place.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton import knobs

from outrider.kernels.fp8_cache import FP8, HeadScales
from outrider.kernels.gpu.common import require_tensor

_INTERPRETED = tl.constexpr(knobs.runtime.interpret)  # the interpreter runs no instructions of the card
_MAX_FP8 = tl.constexpr(448.0)
_FRACTION = tl.constexpr(23)  # bits of a float32 below the exponent
_TOP = tl.constexpr(14)  # a query's greatest number is brought to at least 2^14 and less than 2^15
PAIRS_BELOW = tl.constexpr(64)  # rows of a tile
_LEAST = tl.constexpr(15)  # exponents of smaller numbers are taken for this one, so that no power of two overflows


@triton.jit
def as_stored(value, scales, head, exists, cache):
    """Convert numbers of heads [heads, columns] to the dtype of `cache`, a pointer; for fp8, divide them by the scales
    of their heads first. `exists` [heads]: which heads there are."""
    if cache.dtype.element_ty == tl.float8e4nv:
        scale = tl.load(scales + head, mask=exists, other=1.0)
        return saturated(tl.div_rn(value.to(tl.float32), scale[:, None]))
    else:
        return value


@triton.jit
def latent_as_stored(value, cache):
    """Convert numbers of a latent, or of the key beside it, to the dtype of `cache`, a pointer. Latents have no
    scale."""
    if cache.dtype.element_ty == tl.float8e4nv:
        return saturated(value.to(tl.float32))
    else:
        return value


@triton.jit
def saturated(wide):
    """Convert numbers to fp8. Those beyond its range become the greatest number; NaN stays NaN, which tl.clamp would
    change."""
    wide = tl.where(wide > _MAX_FP8, _MAX_FP8, tl.where(wide < -_MAX_FP8, -_MAX_FP8, wide))
    return wide.to(tl.float8e4nv)


@triton.jit
def first_of_pairs(pairs):
    """The first numbers of pairs, in float16."""
    if _INTERPRETED:
        return pairs.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; .reg .b16 a, b; prmt.b32 t, $1, 0, 0x3120; mov.b32 {a, b}, t; cvt.rn.f16x2.e4m3x2 $0, a; }",
            "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def second_of_pairs(pairs):
    """The second numbers of pairs, in float16."""
    if _INTERPRETED:
        return (pairs >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; .reg .b16 a, b; prmt.b32 t, $1, 0, 0x3120; mov.b32 {a, b}, t; cvt.rn.f16x2.e4m3x2 $0, b; }",
            "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def load_halves(rows, inside, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr):
    """Load (first, second numbers of pairs) [rows, WIDTH_PAD / 2] of the rows that begin at pointers [rows, 1]; 0 for
    rows that are not inside."""
    pair = tl.arange(0, WIDTH_PAD // 2)[None, :]
    at = rows.to(tl.pointer_type(tl.int16), bitcast=True) + pair
    pairs = tl.load(at, mask=inside[:, None] & (pair < WIDTH // 2), other=0)
    return first_of_pairs(pairs), second_of_pairs(pairs)


@triton.jit
def fit_queries(queries, scale, k_scales, kv_head, k_cache):
    """Prepare queries [rows, dim] for their product with the keys of one KV head. Returns (queries, scale): attention
    scores are their product, multiplied by scale.

    If keys are stored in fp8, scale includes the scale of the head's keys, and 16-bit queries are multiplied by powers
    of two that keep the product in float16's range. Otherwise both are returned unchanged."""
    if k_cache.dtype.element_ty == tl.float8e4nv:
        scale = scale * tl.load(k_scales + kv_head)
        return fit_rows(queries, scale)
    else:
        return queries, scale


@triton.jit
def fit_rows(queries, scale):
    """Do what `fit_queries` does, for keys in fp8, when `scale` already includes the scale of the head."""
    if queries.dtype == tl.float32:
        return queries, scale
    else:
        up, down = row_powers(queries)
        return scaled_rows(queries, up), (scale * down)[:, None]


@triton.jit
def row_powers(queries):
    """Return (powers of two that bring the rows' greatest numbers near the end of float16's range, their inverses)."""
    peak = tl.max(tl.abs(queries.to(tl.float32)), axis=1)
    exponent = tl.maximum(peak.to(tl.int32, bitcast=True) >> _FRACTION, _LEAST)
    up = ((254 - exponent + _TOP) << _FRACTION).to(tl.float32, bitcast=True)
    return up, ((exponent - _TOP) << _FRACTION).to(tl.float32, bitcast=True)


@triton.jit
def scaled_rows(queries, power):
    return (queries.to(tl.float32) * power[:, None]).to(tl.float16)


@triton.jit
def fit_latent_queries(q_latent, q_rope, scale, cache):
    """`fit_queries` for the two parts of queries over the latent cache, whose products are added up."""
    if cache.dtype.element_ty == tl.float8e4nv and q_latent.dtype != tl.float32:
        up, down = row_powers(q_latent)
        rope_up, rope_down = row_powers(q_rope)
        up, down = tl.minimum(up, rope_up), tl.maximum(down, rope_down)
        return scaled_rows(q_latent, up), scaled_rows(q_rope, up), (scale * down)[:, None]
    else:
        return q_latent, q_rope, scale


@triton.jit
def scaled_values(acc, v_scales, kv_head, v_cache):
    """Multiply weighted values by the scale of their head, if values are stored in fp8."""
    if v_cache.dtype.element_ty == tl.float8e4nv:
        return acc * tl.load(v_scales + kv_head)
    else:
        return acc


def check_cache_dtype(name: str, k_cache: torch.Tensor, v_cache: torch.Tensor, shape: tuple[int | None, ...],
                      made: torch.Tensor, scales: HeadScales | None) -> None:
    """Check that keys and values have this shape, and either the dtype of the tensor `made` that they come from, or fp8
    with scales."""
    dtype = made.dtype if scales is None else FP8
    require_tensor(name, "k_cache", k_cache, shape, made.device, (dtype,))
    require_tensor(name, "v_cache", v_cache, tuple(k_cache.shape), made.device, (dtype,))
    if scales is not None:
        require_tensor(name, "scales.k", scales.k, (k_cache.shape[2],), made.device, (torch.float32,))
        require_tensor(name, "scales.v", scales.v, (k_cache.shape[2],), made.device, (torch.float32,))
