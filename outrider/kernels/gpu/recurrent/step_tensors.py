"""Data that the recurrent kernels share: a step's tensors, the places of a token's earlier inputs, and the content of a
row.

    token j, counted from the request's first one of this step
    j < -pending          the row's tail: inputs before all pending drafts
    -pending <= j < 0     the row's window: accepted drafts, folded in this step
    0 <= j                token rows of this step: known tokens, then drafts

Requests without known tokens are dead: their rows do not change. Rows that ended are folded by themselves (FOLD_ONLY);
then only checkpoints are written."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from outrider.kernels.gpu.common import FLOATS, next_power_of_two, require, require_tensor
from outrider.kernels.recurrent import CheckpointTargets


class StepConfig(NamedTuple):
    """Launch options of a state kernel, including how much of a head's state one program has."""

    tile: int  # rows of the state (of the head's dim) in a program
    num_warps: int


class StepTensors(NamedTuple):
    """A batch's tensors, the same for all layers. int64."""

    counts: torch.Tensor  # [7, requests] row, first token row, token row after the last one, computed, known, drafts,
    #                       pending; live ones
    request_of: torch.Tensor  # [tokens]

    @classmethod
    def stack(cls, rows: torch.Tensor, query_starts: torch.Tensor, computed: torch.Tensor, num_known: torch.Tensor,
                 num_drafts: torch.Tensor, pending: torch.Tensor, request_of: torch.Tensor) -> StepTensors:
        counts = torch.stack([rows, query_starts[:-1], query_starts[1:], computed, num_known, num_drafts, pending])
        return cls(counts, request_of)


class LayerTensors(NamedTuple):
    """State, tail and draft window of one layer for every row, and the place of the layer in a checkpoint."""

    state: torch.Tensor  # [ROWS, heads, dim, n] float32
    tail: torch.Tensor  # [ROWS, conv width - 1, conv dim]
    conv_in: torch.Tensor  # [ROWS, window, conv dim]
    gates: tuple[torch.Tensor, ...]  # [ROWS, window, n] each
    pool: torch.Tensor  # [pages, page elements] in the model's dtype
    checkpoint_start: int  # bytes of a checkpoint before this layer's state, which its tail follows


class StepInputs(NamedTuple):
    """A layer's inputs in a step: as the projections made them, and as the recurrence reads them (`recurrent_inputs`).
    The latter hold pending token f of request r at index r * window + f, and token row t at requests * window + t."""

    conv_in: torch.Tensor  # [tokens, conv dim]
    gates: tuple[torch.Tensor, ...]  # [tokens, n] each
    convolved: torch.Tensor  # [requests * window + tokens, conv dim] float32
    wide_gates: tuple[torch.Tensor, ...]  # [requests * window + tokens, n] float32 each


class TargetPointers(NamedTuple):
    """The checkpoint targets as kernel arguments. They are always passed, so that a launch without checkpoints has the
    same signature."""

    starts: torch.Tensor
    boundary: torch.Tensor
    pages: torch.Tensor
    pool: torch.Tensor  # float32 words


# On the device


@triton.jit
def load_counts(counts, request, requests):
    """Load (row, first token row, token row after the last one, computed, known, drafts, pending) of a request."""
    row = tl.load(counts + request)
    start = tl.load(counts + requests + request).to(tl.int32)
    stop = tl.load(counts + 2 * requests + request).to(tl.int32)
    computed = tl.load(counts + 3 * requests + request).to(tl.int32)
    known = tl.load(counts + 4 * requests + request).to(tl.int32)
    drafts = tl.load(counts + 5 * requests + request).to(tl.int32)
    pending = tl.load(counts + 6 * requests + request).to(tl.int32)
    return row, start, stop, computed, known, drafts, pending


@triton.jit
def input_of(
    conv_in, conv_stride, tail, window, row, start, pending, j, channel, valid,
    CONV_DIM: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr,
):
    """Load raw inputs of the request's token j from the tail, the window or this step. `j` and `channel` must
    broadcast."""
    is_new = valid & (j >= 0)
    value = tl.load(conv_in + (start + j).to(tl.int64) * conv_stride + channel, mask=is_new, other=0.0)
    before = j + pending
    if WINDOW > 0:
        is_pending = valid & (j < 0) & (before >= 0)
        cell = window + row * (WINDOW * CONV_DIM) + before * CONV_DIM + channel
        value = tl.where(is_pending, tl.load(cell, mask=is_pending, other=0.0), value)
    is_tail = valid & (before < 0)
    cell = tail + row * ((WIDTH - 1) * CONV_DIM) + (before + WIDTH - 1) * CONV_DIM + channel
    return tl.where(is_tail, tl.load(cell, mask=is_tail, other=0.0), value)


@triton.jit
def save_state(
    state, at, request, first_row, num_rows, saves, layer_word, num_pages, N: tl.constexpr, PAGE_WORDS: tl.constexpr
):
    """Write part of a layer's state (`num_rows` rows of N elements from `first_row` on) to the request's checkpoints
    whose boundary is `at`. Rows are written one by one: this is rare, and its addresses must not use up registers."""
    bits = state.to(tl.int32, bitcast=True)
    index, n = tl.arange(0, state.shape[0])[:, None], tl.arange(0, state.shape[1])
    for target in range(tl.load(saves.starts + request), tl.load(saves.starts + request + 1)):
        if tl.load(saves.boundary + target) == at:
            for row in range(num_rows):
                # The only row that is not 0, as an integer: a sum of floats would lose the sign of a zero.
                line = tl.sum(tl.where(index == row, bits, 0), axis=0).to(tl.float32, bitcast=True)
                word = layer_word + (first_row + row) * N + n
                page = tl.load(saves.pages + target * num_pages + word // PAGE_WORDS, mask=n < N, other=0)
                tl.store(saves.pool + page * PAGE_WORDS + word % PAGE_WORDS, line, mask=n < N)


@triton.jit
def save_rows(
    state, at, request, row, n, has_row, has_n, saves, layer_word, num_pages, N: tl.constexpr, PAGE_WORDS: tl.constexpr
):
    """Do what `save_state` does, for rows `row` [D] at once. A row is in one page or in two; pages are looked up by
    row, which takes far fewer registers than by element."""
    tl.static_assert(N <= PAGE_WORDS)
    for target in range(tl.load(saves.starts + request), tl.load(saves.starts + request + 1)):
        if tl.load(saves.boundary + target) == at:
            word = layer_word + row * N
            column = word % PAGE_WORDS
            listed = saves.pages + target * num_pages + word // PAGE_WORDS
            first = tl.load(listed, mask=has_row, other=0) * PAGE_WORDS + column
            left = PAGE_WORDS - column
            cells = saves.pool + first[:, None] + n[None, :]
            tl.store(cells, state, mask=has_row[:, None] & has_n[None, :] & (n[None, :] < left[:, None]))
            if (layer_word % N != 0) | (PAGE_WORDS % N != 0):  # else no row is cut
                is_cut = has_row & (left < N)
                second = tl.load(listed + 1, mask=is_cut, other=0) * PAGE_WORDS - left
                cells = saves.pool + second[:, None] + n[None, :]
                tl.store(cells, state, mask=is_cut[:, None] & has_n[None, :] & (n[None, :] >= left[:, None]))


@triton.jit
def next_boundary(at, end, request, saves):
    """Return the first checkpoint boundary after `at`, but not after `end`."""
    found = end
    for target in range(tl.load(saves.starts + request), tl.load(saves.starts + request + 1)):
        there = tl.load(saves.boundary + target).to(tl.int32)
        found = tl.where((there > at) & (there < found), there, found)
    return found


@triton.jit
def load_tail(
    part, row, start, known, pending, valid, conv_in, conv_stride, tail, window, CONV_DIM: tl.constexpr,
    WIDTH: tl.constexpr, WINDOW: tl.constexpr, PARTS: tl.constexpr, CHANNELS: tl.constexpr, TAIL: tl.constexpr,
):
    """Load the row's tail [TAIL, CHANNELS] as it will be after the step: this program's share of the channels, for
    `keep_inputs` to store. It may come from the old tail and from the window, so it is read before either is
    overwritten."""
    per_part: tl.constexpr = (CONV_DIM + PARTS - 1) // PARTS
    lane = tl.arange(0, CHANNELS)
    channel = (part * per_part + lane)[None, :]
    index = tl.arange(0, TAIL)[:, None]
    is_own = (index < WIDTH - 1) & (lane < per_part)[None, :] & (channel < CONV_DIM) & valid
    return input_of(
        conv_in, conv_stride, tail, window, row, start, pending, known - (WIDTH - 1) + index, channel, is_own, CONV_DIM,
        WIDTH, WINDOW,
    )


@triton.jit
def keep_inputs(
    kept_tail, part, row, start, known, drafts, conv_in, conv_stride, gates, gate_strides, tail, window, gate_windows,
    CONV_DIM: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, HEADS: tl.constexpr, FIRST_GATE: tl.constexpr,
    GATES: tl.constexpr, PARTS: tl.constexpr, CHANNELS: tl.constexpr, TAIL: tl.constexpr, DRAFTS: tl.constexpr,
):
    """Store the row's tail, from `load_tail`, and its window after a step: this program's share of the channels, which
    no other program reads or writes. FIRST_GATE: how many numbers a token's first gate has; other gates have one for
    each head."""
    per_part: tl.constexpr = (CONV_DIM + PARTS - 1) // PARTS
    lane = tl.arange(0, CHANNELS)
    channel = (part * per_part + lane)[None, :]
    is_own = (lane < per_part)[None, :] & (channel < CONV_DIM)
    index = tl.arange(0, TAIL)[:, None]
    tl.debug_barrier()  # other threads may have read what this one overwrites
    valid = (index < WIDTH - 1) & is_own
    tl.store(tail + row * ((WIDTH - 1) * CONV_DIM) + index * CONV_DIM + channel, kept_tail, mask=valid)
    if WINDOW > 0:
        draft = tl.arange(0, DRAFTS)[:, None]
        source = (start + known + draft).to(tl.int64)
        kept = (draft < drafts) & is_own
        value = tl.load(conv_in + source * conv_stride + channel, mask=kept, other=0.0)
        tl.store(window + row * (WINDOW * CONV_DIM) + draft * CONV_DIM + channel, value, mask=kept)
        first: tl.constexpr = 0 if FIRST_GATE == HEADS else 1
        if first == 1:  # a share of the channels each
            is_gate = (lane < per_part)[None, :] & (channel < FIRST_GATE) & (draft < drafts)
            wide = tl.load(gates[0] + source * gate_strides[0] + channel, mask=is_gate, other=0.0)
            tl.store(gate_windows[0] + row * (WINDOW * FIRST_GATE) + draft * FIRST_GATE + channel, wide, mask=is_gate)
        if part < HEADS:  # one column of the gates each, for the first programs
            for g in tl.static_range(first, GATES):
                gate = tl.load(gates[g] + source * gate_strides[g] + part, mask=draft < drafts, other=0.0)
                cell = gate_windows[g] + row * (WINDOW * HEADS) + draft * HEADS + part
                tl.store(cell, gate, mask=draft < drafts)


@triton.jit
def load_last_stop(counts, requests):
    """Load the index of the first token row that belongs to no request."""
    return tl.load(counts + 3 * requests - 1).to(tl.int32)


@triton.jit
def clear_dead(out, out_stride, column, valid, request, requests, live, start, stop, last_stop, tokens):
    """Write zeros to the request's dead token rows, and to its share of the token rows without a request, which begin
    at `last_stop`. `column` [D]: the program's part of an output row."""
    zero = tl.zeros(column.shape, dtype=out.dtype.element_ty)
    first = start + live
    for i in range(stop - first):
        tl.store(out + (first + i).to(tl.int64) * out_stride + column, zero, mask=valid)
    first = last_stop + request
    for i in range(tl.cdiv(tokens - first, requests)):
        tl.store(out + (first + i * requests).to(tl.int64) * out_stride + column, zero, mask=valid)


# On the host


class StepSizes(NamedTuple):
    requests: int
    tokens: int
    heads: int
    dim: int
    n: int
    conv_dim: int
    width: int
    window: int


def check_step(name: str, step: StepTensors, inputs: StepInputs, layer: LayerTensors,
               targets: CheckpointTargets | None, gate_sizes: tuple[int, ...]) -> StepSizes:
    """Check shapes, dtypes and devices of a state kernel's arguments. gate_sizes: how many numbers of each gate a token
    has; the first gate has at most as many as the convolution has inputs."""
    device, dtype = layer.state.device, inputs.conv_in.dtype
    requests, tokens = step.counts.shape[1], inputs.conv_in.shape[0]
    num_rows, heads, dim, n = layer.state.shape
    width, window, conv_dim = layer.tail.shape[1] + 1, layer.conv_in.shape[1], layer.tail.shape[2]
    int64, wide = (torch.int64,), (torch.float32,)
    scratch = requests * window + tokens
    require_tensor(name, "step.counts", step.counts, (7, requests), device, int64, 2)
    require_tensor(name, "step.request_of", step.request_of, (tokens,), device, int64)
    require_tensor(name, "layer.state", layer.state, (num_rows, heads, dim, n), device, wide, 4)
    require_tensor(name, "layer.tail", layer.tail, (num_rows, width - 1, conv_dim), device, (dtype,), 3)
    require_tensor(name, "layer.conv_in", layer.conv_in, (num_rows, window, conv_dim), device, (dtype,), 3)
    require_tensor(name, "inputs.conv_in", inputs.conv_in, (tokens, conv_dim), device, FLOATS)
    require_tensor(name, "inputs.convolved", inputs.convolved, (scratch, conv_dim), device, wide, 2)
    for given in (layer.gates, inputs.gates, inputs.wide_gates):
        require(len(given) == len(gate_sizes), name, "gates", f"are {len(given)}, not {len(gate_sizes)}")
    require(gate_sizes[0] in range(heads, conv_dim + 1), name, "gates", f"have {gate_sizes[0]} numbers of a token")
    for size, kept, raw, made in zip(gate_sizes, layer.gates, inputs.gates, inputs.wide_gates, strict=True):
        require_tensor(name, "layer.gates", kept, (num_rows, window, size), device, (dtype,), 3)
        require_tensor(name, "inputs.gates", raw, (tokens, size), device, (dtype,))
        require_tensor(name, "inputs.wide_gates", made, (scratch, size), device, wide, 2)
    if targets is not None:
        count = targets.boundary.shape[0]
        require_tensor(name, "targets.starts", targets.starts, (requests + 1,), device, int64)
        require_tensor(name, "targets.boundary", targets.boundary, (count,), device, int64)
        require_tensor(name, "targets.pages", targets.pages, (count, None), device, int64, 2)
        require_tensor(name, "layer.pool", layer.pool, (None, None), device, (dtype,), 2)
        page_bytes = layer.pool.shape[1] * dtype.itemsize
        ok = page_bytes % 4 == 0 and layer.checkpoint_start % 4 == 0
        require(ok, name, "layer.pool", f"has pages of {page_bytes} bytes and a layer at {layer.checkpoint_start}")
    return StepSizes(requests, tokens, heads, dim, n, conv_dim, width, window)


def keep_sizes(sizes: StepSizes, parts: int) -> dict[str, int]:
    """Return the constants of `keep_inputs`, whose work `parts` programs of a request share."""
    require(parts >= sizes.heads, "keep_inputs", "parts", f"are {parts}, fewer than heads")
    return {
        "CONV_DIM": sizes.conv_dim, "WIDTH": sizes.width, "WINDOW": sizes.window, "PARTS": parts,
        "CHANNELS": next_power_of_two(-(-sizes.conv_dim // parts)), "TAIL": next_power_of_two(sizes.width - 1),
        "DRAFTS": next_power_of_two(sizes.window),
    }


def save_args(targets: CheckpointTargets | None, step: StepTensors,
              layer: LayerTensors) -> tuple[TargetPointers, int, int, int]:
    """Return (the arguments of `save_state`, the layer's first word, pages of a checkpoint, words of a page). Without
    checkpoints the last is 0, and tensors of the right types are passed in place of the missing ones."""
    if targets is None:
        return TargetPointers(step.counts, step.counts, step.counts, layer.state), 0, 0, 0
    words = layer.pool.view(torch.float32)
    saves = TargetPointers(targets.starts, targets.boundary, targets.pages, words)
    return saves, layer.checkpoint_start // 4, targets.pages.shape[1], words.shape[1]
