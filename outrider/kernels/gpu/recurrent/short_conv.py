"""A recurrent layer that is only a convolution (LFM2), over a ragged batch: its results, then the rows' new tails and
windows.

This layer keeps only its last inputs, so nothing is folded: accepted drafts in the row's window are ordinary inputs.
There are two launches, because the first one reads what the second overwrites.
"""

from __future__ import annotations

import torch
import triton.language as tl

from outrider.kernels.gpu.common import FLOATS, cdiv, next_power_of_two, require_tensor
from outrider.kernels.gpu.launch.triton_kernel import kernel
from outrider.kernels.gpu.recurrent.inputs import ConvParams
from outrider.kernels.gpu.recurrent.step_tensors import (
    LayerTensors,
    StepSizes,
    StepTensors,
    input_of,
    keep_inputs,
    keep_sizes,
    load_counts,
    load_tail,
)

_CHANNELS = 1024


@kernel(do_not_specialize=["requests"], do_not_specialize_on_alignment=["request_of"])
def _conv_kernel(
    counts, request_of, requests, conv_in, conv_stride, tail, window, weight, bias, out,
    CONV_DIM: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, HAS_BIAS: tl.constexpr, CHANNELS: tl.constexpr,
):
    """Each program computes some channels of one token row; 0 for a dead row."""
    token = tl.program_id(0)
    request = tl.load(request_of + token).to(tl.int32)
    row, start, stop, computed, known, drafts, pending = load_counts(counts, request, requests)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    in_row, j = channel < CONV_DIM, token - start
    is_live = (known > 0) & (j < known + drafts) & (token < stop)
    total = tl.zeros([CHANNELS], dtype=tl.float32)
    for tap in tl.static_range(WIDTH):
        value = input_of(
            conv_in, conv_stride, tail, window, row, start, pending, j - (WIDTH - 1) + tap, channel, in_row & is_live,
            CONV_DIM, WIDTH, WINDOW,
        )
        total += value.to(tl.float32) * tl.load(weight + tap * CONV_DIM + channel, mask=in_row, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + channel, mask=in_row, other=0.0)
    at = out + token.to(tl.int64) * CONV_DIM + channel
    tl.store(at, tl.where(is_live, total, 0.0).to(out.dtype.element_ty), mask=in_row)


@kernel(do_not_specialize=["requests"])
def _keep_kernel(
    counts, requests, conv_in, conv_stride, tail, window,
    CONV_DIM: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, PARTS: tl.constexpr, CHANNELS: tl.constexpr,
    TAIL: tl.constexpr, DRAFTS: tl.constexpr,
):
    """Each program stores some channels of one request's tail and window. Those of dead requests do not change."""
    row, start, stop, computed, known, drafts, pending = load_counts(counts, tl.program_id(1), requests)
    if known > 0:
        kept_tail = load_tail(tl.program_id(0), row, start, known, pending, True, conv_in, conv_stride, tail, window,
                              CONV_DIM, WIDTH, WINDOW, PARTS, CHANNELS, TAIL)
        keep_inputs(
            kept_tail, tl.program_id(0), row, start, known, drafts, conv_in, conv_stride, (conv_in,), (conv_stride,),
            tail, window, (window,), CONV_DIM, WIDTH, WINDOW, 0, 0, 0, PARTS, CHANNELS, TAIL, DRAFTS,
        )


def conv_steps(step: StepTensors, conv_in: torch.Tensor, layer: LayerTensors, conv: ConvParams) -> torch.Tensor:
    """Advance the rows of a batch by one step, and return the convolution of conv_in [tokens, conv dim], without an
    activation, in its dtype; 0 for dead and padded token rows."""
    name, device, wide, dtype = "conv_steps", conv_in.device, (torch.float32,), (conv_in.dtype,)
    requests, (tokens, conv_dim), width = step.counts.shape[1], conv_in.shape, conv.weight.shape[0]
    num_rows, window = layer.conv_in.shape[:2]
    require_tensor(name, "conv_in", conv_in, (tokens, conv_dim), device, FLOATS)
    require_tensor(name, "step.counts", step.counts, (7, requests), device, (torch.int64,), 2)
    require_tensor(name, "step.request_of", step.request_of, (tokens,), device, (torch.int64,))
    require_tensor(name, "conv.weight", conv.weight, (width, conv_dim), device, wide, 2)
    require_tensor(name, "layer.tail", layer.tail, (num_rows, width - 1, conv_dim), device, dtype, 3)
    require_tensor(name, "layer.conv_in", layer.conv_in, (num_rows, window, conv_dim), device, dtype, 3)
    if conv.bias is not None:
        require_tensor(name, "conv.bias", conv.bias, (conv_dim,), device, wide)
    out = torch.empty(tokens, conv_dim, dtype=conv_in.dtype, device=device)
    if not requests or not tokens:
        return out.zero_()
    channels = min(_CHANNELS, next_power_of_two(conv_dim))
    parts = cdiv(conv_dim, channels)
    _conv_kernel[(tokens, parts)](
        step.counts, step.request_of, requests, conv_in, conv_in.stride(0), layer.tail, layer.conv_in, conv.weight,
        conv.weight if conv.bias is None else conv.bias, out, CONV_DIM=conv_dim, WIDTH=width, WINDOW=window,
        HAS_BIAS=conv.bias is not None, CHANNELS=channels, num_warps=4,
    )
    sizes = StepSizes(requests, tokens, heads=0, dim=0, n=0, conv_dim=conv_dim, width=width, window=window)
    _keep_kernel[(parts, requests)](
        step.counts, requests, conv_in, conv_in.stride(0), layer.tail, layer.conv_in, **keep_sizes(sizes, parts),
        num_warps=4,
    )
    return out
