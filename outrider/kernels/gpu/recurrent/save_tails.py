"""Conv tails of checkpoints: the last inputs before each boundary that a step passes, copied to the checkpoint's pages.

This runs before the rows' own tails and windows are updated. Which boundaries are passed was decided earlier; the
kernels that compute states save them.
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
    require_tensor,
    uses_pdl,
    wait_for_inputs,
)
from outrider.kernels.gpu.launch.triton_kernel import kernel
from outrider.kernels.gpu.recurrent.step_tensors import LayerTensors, StepTensors, input_of, load_counts
from outrider.kernels.recurrent import CheckpointTargets

_CHANNELS = 256


@kernel(do_not_specialize=["requests", "start_element"])
def _save_tails_kernel(
    counts, requests, conv_in, conv_stride, tail, window, starts, boundary, pages, pool, num_pages, start_element,
    CONV_DIM: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, PAGE: tl.constexpr, CHANNELS: tl.constexpr,
    TAIL: tl.constexpr, PDL: tl.constexpr,
):
    release_dependents(PDL)
    wait_for_inputs(PDL)
    request = tl.program_id(1)
    row, start, stop, computed, known, drafts, pending = load_counts(counts, request, requests)
    channel = (tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS))[None, :]
    index = tl.arange(0, TAIL)[:, None]
    valid = (index < WIDTH - 1) & (channel < CONV_DIM)
    for target in range(tl.load(starts + request), tl.load(starts + request + 1)):
        at = tl.load(boundary + target).to(tl.int32)
        if at >= 0:
            value = input_of(
                conv_in, conv_stride, tail, window, row, start, pending, at - computed - (WIDTH - 1) + index, channel,
                valid, CONV_DIM, WIDTH, WINDOW,
            )
            element = start_element + index * CONV_DIM + channel
            page = tl.load(pages + target * num_pages + element // PAGE, mask=valid, other=0)
            tl.store(pool + page * PAGE + element % PAGE, value, mask=valid)


def save_tails(step: StepTensors, conv_in: torch.Tensor, layer: LayerTensors, targets: CheckpointTargets) -> None:
    """Copy conv tails to checkpoints. conv_in [tokens, conv dim]: this step's inputs. In a checkpoint the tail follows
    the layer's state."""
    name, device, dtype = "save_tails", conv_in.device, (conv_in.dtype,)
    requests, window = step.counts.shape[1], layer.conv_in.shape[1]
    taps, conv_dim = layer.tail.shape[1:]
    require_tensor(name, "conv_in", conv_in, (None, conv_dim), device, FLOATS)
    require_tensor(name, "step.counts", step.counts, (7, requests), device, (torch.int64,), 2)
    require_tensor(name, "layer.tail", layer.tail, (None, taps, conv_dim), device, dtype, 3)
    require_tensor(name, "layer.conv_in", layer.conv_in, (None, window, conv_dim), device, dtype, 3)
    require_tensor(name, "targets.starts", targets.starts, (requests + 1,), device, (torch.int64,))
    require_tensor(name, "targets.pages", targets.pages, (targets.boundary.shape[0], None), device, (torch.int64,), 2)
    require_tensor(name, "layer.pool", layer.pool, (None, None), device, dtype, 2)
    if not requests:
        return
    state_bytes = layer.state[0].numel() * layer.state.element_size()
    channels, pdl = min(_CHANNELS, next_power_of_two(conv_dim)), uses_pdl(device)
    _save_tails_kernel[(cdiv(conv_dim, channels), requests)](
        step.counts, requests, conv_in, conv_in.stride(0), layer.tail, layer.conv_in, targets.starts, targets.boundary,
        targets.pages, layer.pool, targets.pages.shape[1],
        (layer.checkpoint_start + state_bytes) // conv_in.element_size(),
        CONV_DIM=conv_dim, WIDTH=taps + 1, WINDOW=window, PAGE=layer.pool.shape[1], CHANNELS=channels,
        TAIL=next_power_of_two(taps), PDL=pdl, num_warps=4, **pdl_options(pdl),
    )
