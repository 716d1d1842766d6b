"""Several residual streams side by side in each token row: kernels that add a layer's result to all streams and norm
them, compute their gates, and take their gated mean.

Each kernel treats every token row by itself. Numbers are rounded where the torch reference rounds them
(`kernels/streams.py`).
"""

from __future__ import annotations

import torch
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

_MAX_WIDTH = 65536
_MIX_COLUMNS = 512  # of a program that mixes streams


@kernel
def _join_kernel(
    x, weights, streams, gain, out, x_stride, weights_stride, streams_stride, out_stride, eps,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, HAS_X: tl.constexpr, PDL: tl.constexpr,
):
    """Each program serves one stream of one token row."""
    release_dependents(PDL)
    token, stream = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, COLUMNS)
    valid = column < WIDTH
    factor = tl.load(gain + stream * WIDTH + column, mask=valid, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    dtype: tl.constexpr = out.dtype.element_ty
    at = streams + token * streams_stride + stream * WIDTH + column
    value = tl.load(at, mask=valid, other=0.0)
    if HAS_X:
        weight = tl.load(weights + token * weights_stride + stream).to(tl.float32)
        added = tl.load(x + token * x_stride + column, mask=valid, other=0.0).to(tl.float32) * weight
        value = (value.to(tl.float32) + added.to(dtype).to(tl.float32)).to(dtype)
        tl.store(at, value, mask=valid)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / WIDTH + eps)
    tl.store(out + token * out_stride + stream * WIDTH + column, (wide * scale * factor).to(dtype), mask=valid)


def join_streams(x: torch.Tensor | None, weights: torch.Tensor | None, streams: torch.Tensor, gain: torch.Tensor,
                 eps: float, num_streams: int, *, pdl: bool | None = None) -> torch.Tensor:
    """Add a layer's result to each residual stream, and norm each stream; see `kernels.streams.join_streams` for the
    arguments."""
    name, device = "join_streams", streams.device
    pdl = uses_pdl(device) if pdl is None else pdl
    require_tensor(name, "streams", streams, (None, None), device, FLOATS)
    num_tokens, width = streams.shape
    require(num_streams > 0 and width % num_streams == 0 and width // num_streams <= _MAX_WIDTH, name, "streams",
            f"has {width} columns, expected {num_streams} streams of at most {_MAX_WIDTH}")
    size = width // num_streams
    require_tensor(name, "gain", gain, (width,), device, FLOATS)
    require((x is None) == (weights is None), name, "weights", "must be given with x, and only with it")
    if x is not None and weights is not None:
        require_tensor(name, "x", x, (num_tokens, size), device, (streams.dtype,))
        require_tensor(name, "weights", weights, (num_tokens, num_streams), device, (streams.dtype,))
    out = torch.empty(num_tokens, width, dtype=streams.dtype, device=device)
    if num_tokens:
        given = (streams, streams) if x is None or weights is None else (x, weights)
        columns = next_power_of_two(size)
        _join_kernel[(num_tokens, num_streams)](
            *given, streams, gain, out, given[0].stride(0), given[1].stride(0), streams.stride(0), out.stride(0), eps,
            WIDTH=size, COLUMNS=columns, HAS_X=x is not None, PDL=pdl, num_warps=min(16, max(1, columns // 512)),
            **pdl_options(pdl),
        )
    return out


@kernel
def _gates_kernel(
    projected, low, weights, stride, low_stride, weights_stride,
    RANK: tl.constexpr, STREAMS: tl.constexpr, NUM: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):
    """Compute the gates of one token row. NUM: the number of its weights, which is the number of streams or 0."""
    release_dependents(PDL)
    wait_for_inputs(PDL)
    token, column = tl.program_id(0).to(tl.int64), tl.arange(0, COLUMNS)
    dtype: tl.constexpr = low.dtype.element_ty
    value = tl.load(projected + token * stride + column, mask=column < RANK + NUM, other=0.0).to(tl.float32)
    value = (value / STREAMS).to(dtype).to(tl.float32)
    gate = 1.0 / (1.0 + tl.exp(-value))
    tl.store(low + token * low_stride + column, (value * gate).to(dtype), mask=column < RANK)
    if NUM:
        made = 2.0 * gate.to(dtype).to(tl.float32)
        tl.store(weights + token * weights_stride + column - RANK, made.to(dtype),
                 mask=(column >= RANK) & (column < RANK + NUM))


def stream_gates(projected: torch.Tensor, num_streams: int, has_weights: bool, *,
                 pdl: bool | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the low-rank gates and the weights of the residual streams; see `kernels.streams.stream_gates` for the
    arguments."""
    name, device = "stream_gates", projected.device
    pdl = uses_pdl(device) if pdl is None else pdl
    require_tensor(name, "projected", projected, (None, None), device, FLOATS)
    num_tokens, width = projected.shape
    count = num_streams if has_weights else 0
    require(count < width <= _MAX_WIDTH, name, "projected", f"has {width} columns, {count} of them for weights")
    low = torch.empty(num_tokens, width - count, dtype=projected.dtype, device=device)
    weights = torch.empty(num_tokens, count, dtype=projected.dtype, device=device)
    if num_tokens:
        _gates_kernel[(num_tokens,)](
            projected, low, weights if count else low, projected.stride(0), low.stride(0), count, RANK=width - count,
            STREAMS=num_streams, NUM=count, COLUMNS=next_power_of_two(width), PDL=pdl, num_warps=4, **pdl_options(pdl),
        )
    return low, weights


@kernel
def _mix_kernel(
    gates, normed, out, gates_stride, normed_stride, out_stride,
    WIDTH: tl.constexpr, STREAMS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):
    release_dependents(PDL)
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    valid = column < WIDTH
    dtype: tl.constexpr = out.dtype.element_ty
    total = tl.zeros([COLUMNS], dtype=tl.float32)
    for stream in tl.static_range(STREAMS):
        gate = tl.load(gates + token * gates_stride + stream * WIDTH + column, mask=valid, other=0.0).to(tl.float32)
        value = tl.load(normed + token * normed_stride + stream * WIDTH + column, mask=valid, other=0.0).to(tl.float32)
        open_part = (1.0 / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
        total += (open_part * value).to(dtype).to(tl.float32)
    tl.store(out + token * out_stride + column, (total / STREAMS).to(dtype), mask=valid)


def mix_streams(gates: torch.Tensor, normed: torch.Tensor, num_streams: int, *,
                pdl: bool | None = None) -> torch.Tensor:
    """Return the gated mean of the normed residual streams; see `kernels.streams.mix_streams` for the arguments."""
    name, device = "mix_streams", gates.device
    pdl = uses_pdl(device) if pdl is None else pdl
    require_tensor(name, "gates", gates, (None, None), device, FLOATS)
    num_tokens, width = gates.shape
    require(num_streams > 0 and width % num_streams == 0, name, "gates",
            f"has {width} columns, expected {num_streams} streams of the same size")
    require_tensor(name, "normed", normed, (num_tokens, width), device, (gates.dtype,))
    size = width // num_streams
    out = torch.empty(num_tokens, size, dtype=gates.dtype, device=device)
    if num_tokens:
        columns = min(_MIX_COLUMNS, next_power_of_two(size))
        _mix_kernel[(num_tokens, cdiv(size, columns))](
            gates, normed, out, gates.stride(0), normed.stride(0), out.stride(0), WIDTH=size, STREAMS=num_streams,
            COLUMNS=columns, PDL=pdl, num_warps=4, **pdl_options(pdl),
        )
    return out
