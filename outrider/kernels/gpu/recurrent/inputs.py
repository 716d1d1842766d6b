"""The inputs of the recurrences, for all tokens of a step at once: causal convolution with silu, and gates, in float32.

A program computes some channels of one token row, or of a request's pending drafts. It only reads rows' tails and
windows; the kernel that updates these must run later. This file does not depend on the recurrences."""

from __future__ import annotations

from typing import Literal, NamedTuple

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
from outrider.kernels.gpu.recurrent.step_tensors import LayerTensors, StepInputs, StepTensors, input_of, load_counts

GateKind = Literal["mamba2", "delta", "kda"]
PROMPT_TOKENS = 1024  # of a step from which on it is taken to hold prompts
_MAX_LANES = 64  # programs for pending drafts in all; requests beyond that walk over their own, one by one


class GateParams(NamedTuple):
    """The parameters that turn raw gates into the gates of a recurrence. mamba2: dt is softplus(dt + dt_bias) within
    limits. delta: g is decay * softplus(a + dt_bias), and beta is max_beta * sigmoid(b). kda: like delta, with a and
    dt_bias for each key channel; with a lower bound, g is the bound times sigmoid(-decay * (a + dt_bias))."""

    kind: GateKind
    dt_bias: torch.Tensor  # [heads] float32; [heads * k dim] of kda
    decay: torch.Tensor  # [heads] float32, below zero
    limits: tuple[float, float] = (0.0, float("inf"))
    lower_bound: float | None = None
    max_beta: float = 1.0


class ConvParams(NamedTuple):
    weight: torch.Tensor  # [width, conv dim] float32, the token's own tap last
    bias: torch.Tensor | None  # [conv dim] float32


@triton.jit
def _softplus(x):
    """log(1 + exp(x)) without losing small exponentials beside 1. Above 20 it is x itself, as in torch; NaN stays
    NaN."""
    e = tl.exp(tl.minimum(x, 20.0, propagate_nan=tl.PropagateNan.ALL))
    u = 1.0 + e
    exact = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.where(x > 20.0, x, exact)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _load_columns(source, channel, in_row, ROWS: tl.constexpr):
    """Load parameters of channels as [1, CHANNELS], for ROWS token rows. For one row each thread loads what it needs,
    without an exchange."""
    if ROWS == 1:
        return tl.load(source + channel[None, :], mask=in_row[None, :], other=0.0)
    else:
        return tl.load(source + channel, mask=in_row, other=0.0)[None, :]


class ConvPointers(NamedTuple):
    """The convolution's arguments, passed to a kernel as one."""

    conv_in: torch.Tensor
    conv_stride: int
    tail: torch.Tensor
    window: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    convolved: torch.Tensor


class GatePointers(NamedTuple):
    """The gates' arguments, passed to a kernel as one; a tuple has one entry for each gate."""

    gates: tuple[torch.Tensor, ...]
    strides: tuple[int, ...]
    windows: tuple[torch.Tensor, ...]
    dt_bias: torch.Tensor
    decay: torch.Tensor
    low: float  # limits of mamba2's time step; kda's lower bound
    high: float  # of delta and kda: the largest beta
    wide_gates: tuple[torch.Tensor, ...]


@triton.jit
def _convolve(
    target, j, exists, row, start, pending, conv, CONV_DIM: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr,
    HAS_BIAS: tl.constexpr, CHANNELS: tl.constexpr, ARE_NEW: tl.constexpr = False,
):
    """Convolve tokens j [ROWS] of a request, where they exist, into rows `target` [ROWS] of the result. ARE_NEW: all
    inputs that they need belong to this step."""
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    in_row = channel < CONV_DIM
    valid = exists[:, None] & in_row[None, :]
    total = tl.zeros([j.shape[0], CHANNELS], dtype=tl.float32)
    for tap in tl.static_range(WIDTH):
        if ARE_NEW:
            token = (start + j - (WIDTH - 1) + tap).to(tl.int64)[:, None]
            value = tl.load(conv.conv_in + token * conv.conv_stride + channel[None, :], mask=valid, other=0.0)
        else:
            value = input_of(
                conv.conv_in, conv.conv_stride, conv.tail, conv.window, row, start, pending,
                (j - (WIDTH - 1) + tap)[:, None], channel[None, :], valid, CONV_DIM, WIDTH, WINDOW,
            )
        total += value.to(tl.float32) * _load_columns(conv.weight + tap * CONV_DIM, channel, in_row, j.shape[0])
    if HAS_BIAS:
        total += _load_columns(conv.bias, channel, in_row, j.shape[0])
    at = conv.convolved + target.to(tl.int64)[:, None] * CONV_DIM + channel[None, :]
    tl.store(at, total * _sigmoid(total), mask=valid)


@triton.jit
def _raw_gate(gate, stride, window, j, row, start, pending, column, valid, SIZE: tl.constexpr, WINDOW: tl.constexpr):
    """Load columns [COLUMNS] of a gate with SIZE numbers, for tokens j [ROWS] of a request, from this step or from the
    window."""
    token = (start + j).to(tl.int64)[:, None]
    is_new = valid & (j >= 0)[:, None]
    value = tl.load(gate + token * stride + column[None, :], mask=is_new, other=0.0)
    if WINDOW > 0:
        kept = row * (WINDOW * SIZE) + (j + pending)[:, None] * SIZE + column[None, :]
        is_kept = valid & (j < 0)[:, None]
        value = tl.where(is_new, value, tl.load(window + kept, mask=is_kept, other=0.0))
    return value.to(tl.float32)


@triton.jit
def _open_channels(target, j, exists, row, start, pending, gating, HEADS: tl.constexpr, WINDOW: tl.constexpr,
                   DECAYS: tl.constexpr, IS_BOUNDED: tl.constexpr, CHANNELS: tl.constexpr):
    """Compute and store this program's channels of the logarithms of the decays, if each channel has its own decay.
    Arguments as in `_open_gates`."""
    size: tl.constexpr = HEADS * DECAYS
    column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_column = column < size
    valid = exists[:, None] & is_column[None, :]
    step = _raw_gate(gating.gates[0], gating.strides[0], gating.windows[0], j, row, start, pending, column, valid, size,
                     WINDOW)
    step += _load_columns(gating.dt_bias, column, is_column, j.shape[0])
    decay = _load_columns(gating.decay, column // DECAYS, is_column, j.shape[0])
    if IS_BOUNDED:
        g = gating.low * _sigmoid(-decay * step)
    else:
        g = decay * _softplus(step)
    tl.store(gating.wide_gates[0] + target.to(tl.int64)[:, None] * size + column[None, :], g, mask=valid)


@triton.jit
def _open_gates(
    target, j, exists, row, start, pending, gating, HEADS: tl.constexpr, WINDOW: tl.constexpr, IS_DELTA: tl.constexpr,
    DECAYS: tl.constexpr, HEAD_TILE: tl.constexpr,
):
    """Compute gates of tokens j [ROWS] of a request, if they exist, into rows `target` [ROWS] of the results. Gates
    with a number for each channel are left out."""
    head = tl.arange(0, HEAD_TILE)
    is_head = head < HEADS
    valid = exists[:, None] & is_head[None, :]
    at = target.to(tl.int64)[:, None] * HEADS + head[None, :]
    if DECAYS == 1:
        first = _raw_gate(gating.gates[0], gating.strides[0], gating.windows[0], j, row, start, pending, head, valid,
                          HEADS, WINDOW)
        step = _softplus(first + _load_columns(gating.dt_bias, head, is_head, j.shape[0]))
    if IS_DELTA:
        if DECAYS == 1:
            decay = _load_columns(gating.decay, head, is_head, j.shape[0])
            tl.store(gating.wide_gates[0] + at, step * decay, mask=valid)
        second = _raw_gate(gating.gates[1], gating.strides[1], gating.windows[1], j, row, start, pending, head, valid,
                           HEADS, WINDOW)
        tl.store(gating.wide_gates[1] + at, _sigmoid(second) * gating.high, mask=valid)
    else:
        # A card's plain minimum drops NaN.
        step = tl.maximum(step, gating.low, propagate_nan=tl.PropagateNan.ALL)
        tl.store(gating.wide_gates[0] + at, tl.minimum(step, gating.high, propagate_nan=tl.PropagateNan.ALL),
                 mask=valid)


@triton.jit
def _compute_block(
    token, token_end, counts, request_of, requests, conv, gating, CONV_DIM: tl.constexpr, WIDTH: tl.constexpr,
    WINDOW: tl.constexpr, HEADS: tl.constexpr, HAS_BIAS: tl.constexpr, IS_DELTA: tl.constexpr, DECAYS: tl.constexpr,
    IS_BOUNDED: tl.constexpr, CHANNELS: tl.constexpr, HEAD_TILE: tl.constexpr, ROWS: tl.constexpr,
):
    """Compute at most ROWS token rows, [token, token_end), one request at a time; tokens without a request count as
    dead tokens of the last request."""
    index = tl.arange(0, ROWS)
    while token < token_end:
        request = tl.load(request_of + token).to(tl.int32)
        row, start, stop, computed, known, drafts, pending = load_counts(counts, request, requests)
        count = tl.where(token < stop, tl.minimum(stop, token_end), token_end) - token
        j = token - start + index
        exists = (index < count) & (j < known + drafts)
        target = requests * WINDOW + start + j
        if token - start >= WIDTH - 1:
            _convolve(target, j, exists, row, start, pending, conv, CONV_DIM, WIDTH, WINDOW, HAS_BIAS, CHANNELS, True)
        else:
            _convolve(target, j, exists, row, start, pending, conv, CONV_DIM, WIDTH, WINDOW, HAS_BIAS, CHANNELS)
        if DECAYS > 1:
            if tl.program_id(1) * CHANNELS < HEADS * DECAYS:
                _open_channels(target, j, exists, row, start, pending, gating, HEADS, WINDOW, DECAYS, IS_BOUNDED,
                               CHANNELS)
        if tl.program_id(1) == 0:
            _open_gates(target, j, exists, row, start, pending, gating, HEADS, WINDOW, IS_DELTA, DECAYS, HEAD_TILE)
        token += count


@triton.jit
def _own_tokens(program, num_blocks, counts, request_of, requests, lanes, WINDOW: tl.constexpr,
                FOLD_ONLY: tl.constexpr):
    """Return (row, first token row, pending drafts) of a program's request, and its tokens: (first, end, step, row of
    the results for token 0). A program has one token row, or every `lanes`-th of a request's pending drafts."""
    if program < num_blocks:
        request = tl.load(request_of + program).to(tl.int32)
        row, start, stop, computed, known, drafts, pending = load_counts(counts, request, requests)
        first = program - start
        end = tl.where(first < known + drafts, first + 1, first)
        base = requests * WINDOW + start
        step = 1
    else:
        request = (program - num_blocks) // lanes
        row, start, stop, computed, known, drafts, pending = load_counts(counts, request, requests)
        first = (program - num_blocks) % lanes - pending
        end = tl.where((known > 0) | FOLD_ONLY, 0, first)
        base = request * WINDOW + pending
        step = lanes
    return row, start, pending, first, end, step, base


_VARYING = ["requests", "tokens", "lanes", "low", "high"]


@kernel(do_not_specialize=_VARYING, do_not_specialize_on_alignment=["request_of"])
def _inputs_kernel(
    counts, request_of, requests, tokens, lanes, conv_in, conv_stride, gates, gate_strides, tail, window, gate_windows,
    weight, bias, dt_bias, decay, low, high, convolved, wide_gates,
    CONV_DIM: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, HEADS: tl.constexpr, HAS_BIAS: tl.constexpr,
    IS_DELTA: tl.constexpr, DECAYS: tl.constexpr, IS_BOUNDED: tl.constexpr, CHANNELS: tl.constexpr,
    HEAD_TILE: tl.constexpr, FOLD_ONLY: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):
    """Along axis 0, programs of ROWS token rows each come first, then `lanes` programs for the pending drafts of each
    request."""
    if IS_DELTA:
        # In this order, the kernels after this one start when all before it have ended: `delta_steps` loads states
        # before this one has.
        wait_for_inputs(PDL)
        release_dependents(PDL)
    else:
        release_dependents(PDL)
        wait_for_inputs(PDL)
    program = tl.program_id(0)
    num_blocks = tl.cdiv(tokens, ROWS)
    conv = ConvPointers(conv_in, conv_stride, tail, window, weight, bias, convolved)
    gating = GatePointers(gates, gate_strides, gate_windows, dt_bias, decay, low, high, wide_gates)
    if ROWS > 1 and program < num_blocks:
        _compute_block(
            program * ROWS, tl.minimum(tokens, program * ROWS + ROWS), counts, request_of, requests, conv, gating,
            CONV_DIM, WIDTH, WINDOW, HEADS, HAS_BIAS, IS_DELTA, DECAYS, IS_BOUNDED, CHANNELS, HEAD_TILE, ROWS,
        )
    else:
        row, start, pending, first, end, step, base = _own_tokens(
            program, num_blocks, counts, request_of, requests, lanes, WINDOW, FOLD_ONLY
        )
        for place in range(first, end, step):
            j = place + tl.arange(0, 1)
            _convolve(base + j, j, j == place, row, start, pending, conv, CONV_DIM, WIDTH, WINDOW, HAS_BIAS, CHANNELS)
            if DECAYS > 1:
                if tl.program_id(1) * CHANNELS < HEADS * DECAYS:
                    _open_channels(base + j, j, j == place, row, start, pending, gating, HEADS, WINDOW, DECAYS,
                                   IS_BOUNDED, CHANNELS)
            if tl.program_id(1) == 0:
                _open_gates(base + j, j, j == place, row, start, pending, gating, HEADS, WINDOW, IS_DELTA, DECAYS,
                            HEAD_TILE)


def inputs_tile(tokens: int) -> tuple[int, int, int]:
    """Returns (token rows of a program, channels, warps). Programs are small while there are too few of them to fill
    the GPU. With prompts several rows share the weights and the data of their request."""
    if tokens <= 64:
        return 1, 256, 2
    return (1, 1024, 4) if tokens < PROMPT_TOKENS else (8, 128, 2)


def recurrent_inputs(
    step: StepTensors, conv_in: torch.Tensor, gates: tuple[torch.Tensor, ...], layer: LayerTensors, conv: ConvParams,
    gate: GateParams, *, fold_only: bool = False, tile: tuple[int, int, int] | None = None,
) -> StepInputs:
    """Convolve conv_in [tokens, conv dim] and compute gates [tokens, n], all as the projections made them. Results of
    dead tokens and of drafts that are not pending are undefined."""
    name, device, wide = "recurrent_inputs", conv_in.device, (torch.float32,)
    requests, (tokens, conv_dim), window = step.counts.shape[1], conv_in.shape, layer.conv_in.shape[1]
    num_rows, heads, width = layer.state.shape[0], layer.state.shape[1], conv.weight.shape[0]
    require_tensor(name, "conv_in", conv_in, (tokens, conv_dim), device, FLOATS)
    require_tensor(name, "step.counts", step.counts, (7, requests), device, (torch.int64,), 2)
    require_tensor(name, "step.request_of", step.request_of, (tokens,), device, (torch.int64,))
    require_tensor(name, "conv.weight", conv.weight, (width, conv_dim), device, wide, 2)
    require_tensor(name, "layer.tail", layer.tail, (num_rows, width - 1, conv_dim), device, (conv_in.dtype,), 3)
    require_tensor(name, "layer.conv_in", layer.conv_in, (num_rows, window, conv_dim), device, (conv_in.dtype,), 3)
    decays = layer.state.shape[3] if gate.kind == "kda" else 1
    sizes = (heads,) if gate.kind == "mamba2" else (heads * decays, heads)
    require_tensor(name, "gate", gate.dt_bias, sizes[:1], device, wide)
    require_tensor(name, "gate", gate.decay, (heads,), device, wide)
    require(len(gates) == len(sizes), name, "gates", f"are {len(gates)} of {gate.kind}")
    require(sizes[0] <= conv_dim, name, "gates", f"have more columns than conv_in ({conv_dim})")
    for raw, size in zip(gates, sizes, strict=True):
        require_tensor(name, "gates", raw, (tokens, size), device, (conv_in.dtype,))
    bounded = gate.lower_bound is not None
    require(not bounded or gate.kind == "kda", name, "gate", f"has a lower bound, and is of {gate.kind}")
    low, high = gate.limits if gate.kind == "mamba2" else (gate.lower_bound or 0.0, gate.max_beta)
    rows = requests * window + tokens
    made = StepInputs(
        conv_in, gates, torch.empty(rows, conv_dim, dtype=torch.float32, device=device),
        tuple(torch.empty(rows, size, dtype=torch.float32, device=device) for size in sizes),
    )
    lanes = min(window, max(1, _MAX_LANES // max(1, requests)))
    token_rows, channels, num_warps = tile or inputs_tile(tokens)
    channels = min(channels, next_power_of_two(conv_dim))
    grid = (cdiv(tokens, token_rows) + requests * lanes, cdiv(conv_dim, channels))
    pdl = uses_pdl(device)
    if grid[0]:
        _inputs_kernel[grid](
            step.counts, step.request_of, requests, tokens, max(1, lanes), conv_in, conv_in.stride(0), gates,
            tuple(g.stride(0) for g in gates), layer.tail, layer.conv_in, layer.gates, conv.weight,
            conv.weight if conv.bias is None else conv.bias, gate.dt_bias, gate.decay, low, high, made.convolved,
            made.wide_gates, CONV_DIM=conv_dim, WIDTH=width, WINDOW=window, HEADS=heads,
            HAS_BIAS=conv.bias is not None, IS_DELTA=gate.kind != "mamba2", DECAYS=decays,
            IS_BOUNDED=bounded, CHANNELS=channels, HEAD_TILE=next_power_of_two(heads), FOLD_ONLY=fold_only,
            ROWS=token_rows, PDL=pdl, num_warps=num_warps, **pdl_options(pdl),
        )
    return made
