"""Hyper-connections: several residual streams, from which half a layer (attention or MLP) reads a weighted sum, and to
which it writes its result.

One kernel reads: each program computes all weights of a token row, including the repeated normalisation of the mixing
weights, and the weighted sum. Another kernel writes. Numbers are rounded where the torch reference rounds them
(`kernels/streams.py`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

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
from outrider.kernels.streams import StreamRule

_COLUMNS = 1024  # of each stream, that a program handles at once
_MAX_STREAMS = 16


@triton.jit
def _logits(row, place, SECOND: tl.constexpr):
    value = tl.load(row + place).to(tl.float32)
    if SECOND:
        value += tl.load(row + SECOND + place).to(tl.float32)
    return value


@kernel
def _read_kernel(
    streams, logits, scale, base, out, post, mixing, streams_stride, logits_stride, out_stride, rms_eps, eps,
    post_factor, post_eps,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, N: tl.constexpr, ROUNDS: tl.constexpr, WRITES: tl.constexpr,
    SECOND: tl.constexpr, PDL: tl.constexpr,
):
    """Compute the weights and the weighted sum of one token row. SECOND: the column where a second half of the logits
    begins, which is added to the first half; 0 if there is none."""
    release_dependents(PDL)
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    stream, column = tl.arange(0, N), tl.arange(0, COLUMNS)
    own = streams + token * streams_stride + stream[:, None] * WIDTH
    squares = tl.zeros([N, COLUMNS], dtype=tl.float32)
    for begin in range(0, WIDTH, COLUMNS):
        at = begin + column
        value = tl.load(own + at[None, :], mask=(at < WIDTH)[None, :], other=0.0).to(tl.float32)
        squares += value * value
    rms = tl.rsqrt(tl.sum(tl.sum(squares, axis=1), axis=0) / (N * WIDTH) + rms_eps)
    row = logits + token * logits_stride
    pre = _logits(row, stream, SECOND) * rms * tl.load(scale) + tl.load(base + stream)
    pre = 1.0 / (1.0 + tl.exp(-pre)) + eps
    if WRITES:
        after = _logits(row, N + stream, SECOND) * rms * tl.load(scale + 1) + tl.load(base + N + stream)
        tl.store(post + token * N + stream, post_factor / (1.0 + tl.exp(-after)) + post_eps)
    if ROUNDS:
        place = stream[:, None] * N + stream[None, :]
        mixed = _logits(row, 2 * N + place, SECOND) * rms * tl.load(scale + 2) + tl.load(base + 2 * N + place)
        mixed = tl.exp(mixed - tl.max(mixed, axis=1)[:, None])
        mixed = mixed / tl.sum(mixed, axis=1)[:, None] + eps
        mixed = mixed / (tl.sum(mixed, axis=0)[None, :] + eps)
        for _ in range(ROUNDS - 1):
            mixed = mixed / (tl.sum(mixed, axis=1)[:, None] + eps)
            mixed = mixed / (tl.sum(mixed, axis=0)[None, :] + eps)
        tl.store(mixing + token * (N * N) + place, mixed)
    for start in range(0, WIDTH, COLUMNS):
        to = start + column
        again = tl.load(own + to[None, :], mask=(to < WIDTH)[None, :], other=0.0).to(tl.float32)
        total = tl.sum(again * pre[:, None], axis=0)
        tl.store(out + token * out_stride + to, total.to(out.dtype.element_ty), mask=to < WIDTH)


def read_streams(streams: torch.Tensor, logits: torch.Tensor, scale: torch.Tensor, base: torch.Tensor,
                 rule: StreamRule, *, pdl: bool | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the weighted sum of the residual streams, and the weights for writing back; see
    `kernels.streams.read_streams` for the arguments."""
    name, device, n, wide = "read_streams", streams.device, rule.num_streams, (torch.float32,)
    pdl = uses_pdl(device) if pdl is None else pdl
    require_tensor(name, "streams", streams, (None, None), device, FLOATS)
    num_tokens, width = streams.shape
    require(n & (n - 1) == 0 and 0 < n <= _MAX_STREAMS and width % n == 0, name, "streams",
            f"has {width} columns, expected {n} streams, a power of two up to {_MAX_STREAMS}")
    is_double = logits.shape[-1] == 2 * rule.num_logits
    require_tensor(name, "logits", logits, (num_tokens, rule.num_logits * (1 + is_double)), device, wide)
    require_tensor(name, "scale", scale, (len(rule.parts),), device, wide)
    require_tensor(name, "base", base, (rule.num_logits,), device, wide)
    out = torch.empty(num_tokens, width // n, dtype=streams.dtype, device=device)
    post = torch.empty(num_tokens, n if rule.writes else 0, dtype=torch.float32, device=device)
    mixing = torch.empty(num_tokens, rule.parts[2] if len(rule.parts) > 2 else 0, dtype=torch.float32, device=device)
    if num_tokens:
        _read_kernel[(num_tokens,)](
            streams, logits, scale, base, out, post if rule.writes else out, mixing if mixing.shape[1] else out,
            streams.stride(0), logits.stride(0), out.stride(0), rule.rms_eps, rule.eps, rule.post_factor, rule.post_eps,
            WIDTH=width // n, COLUMNS=min(_COLUMNS, next_power_of_two(width // n)), N=n,
            ROUNDS=rule.num_rounds if rule.writes else 0, WRITES=rule.writes,
            SECOND=rule.num_logits if is_double else 0, PDL=pdl, num_warps=8, **pdl_options(pdl),
        )
    return out, post, mixing


@kernel
def _write_kernel(
    streams, x, post, mixing, streams_stride, x_stride,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, N: tl.constexpr, MIXES: tl.constexpr, PDL: tl.constexpr,
):
    release_dependents(PDL)
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    column, stream = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, N)
    valid = column < WIDTH
    own = streams + token * streams_stride + column
    added = tl.load(x + token * x_stride + column, mask=valid, other=0.0).to(tl.float32)
    # All streams are read before the first is written.
    before = tl.load(own[None, :] + stream[:, None] * WIDTH, mask=valid[None, :], other=0.0).to(tl.float32)
    for j in tl.static_range(N):
        if MIXES:
            weight = tl.load(mixing + token * (N * N) + stream * N + j)
        else:
            weight = tl.where(stream == j, 1.0, 0.0)
        total = added * tl.load(post + token * N + j) + tl.sum(before * weight[:, None], axis=0)
        tl.store(own + j * WIDTH, total.to(streams.dtype.element_ty), mask=valid)


def write_streams(streams: torch.Tensor, x: torch.Tensor, post: torch.Tensor, mixing: torch.Tensor, *,
                  pdl: bool | None = None) -> None:
    """Add a layer's result to the residual streams and mix them; see `kernels.streams.write_streams` for the
    arguments."""
    name, device, wide = "write_streams", streams.device, (torch.float32,)
    pdl = uses_pdl(device) if pdl is None else pdl
    require_tensor(name, "streams", streams, (None, None), device, FLOATS)
    num_tokens, width = streams.shape
    n = post.shape[-1]
    require(n > 0 and n & (n - 1) == 0 and width % n == 0, name, "post", f"has {n} weights for {width} columns")
    require_tensor(name, "x", x, (num_tokens, width // n), device, (streams.dtype,))
    require_tensor(name, "post", post, (num_tokens, n), device, wide, 2)
    mixes = mixing.shape[1] > 0
    require_tensor(name, "mixing", mixing, (num_tokens, n * n if mixes else 0), device, wide, 2)
    if num_tokens:
        columns = min(_COLUMNS, next_power_of_two(width // n))
        _write_kernel[(num_tokens, cdiv(width // n, columns))](
            streams, x, post, mixing if mixes else post, streams.stride(0), x.stride(0), WIDTH=width // n,
            COLUMNS=columns, N=n, MIXES=mixes, PDL=pdl, num_warps=4, **pdl_options(pdl),
        )
