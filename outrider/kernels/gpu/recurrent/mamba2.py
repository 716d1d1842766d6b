"""Mamba-2 over a ragged batch, in one launch per layer: fold accepted drafts, apply known tokens, store the state,
compute drafts.

A program has some rows of one head's state of one request. It reads them once and writes them once, whatever the number
of drafts: 2 * 4 bytes per element of the state and step, beside which inputs are small. `kernels/recurrent.py` is the
specification. Short runs go token by token, as in `mamba2_step`; long ones in chunks, as in `mamba2_scan`, cut at the
boundaries of checkpoints; the longest in chunks that are computed side by side (`mamba2_scan.py`). Inputs come from
`recurrent_inputs`; rows' tails and windows are updated here, after it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from outrider.kernels.gpu.common import (
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
from outrider.kernels.gpu.pages.cache_write import zero_or_nan
from outrider.kernels.gpu.recurrent.mamba2_scan import LongRuns, is_long_run, scan_long_runs
from outrider.kernels.gpu.recurrent.step_tensors import (
    LayerTensors,
    StepConfig,
    StepInputs,
    StepTensors,
    check_step,
    clear_dead,
    keep_inputs,
    keep_sizes,
    load_counts,
    load_last_stop,
    load_tail,
    next_boundary,
    save_args,
    save_rows,
)
from outrider.kernels.recurrent import SHORT_RUN, CheckpointTargets

CHUNK = 32  # tokens that products handle at once; with more of them registers spill
_SHORT_RUN = tl.constexpr(SHORT_RUN)


class _Request(NamedTuple):
    """The order in which a request's tokens are applied: pending drafts first, then known tokens, then drafts."""

    index: tl.tensor
    start: tl.tensor  # token row of the first known one
    pending: tl.tensor
    stored: tl.tensor  # places whose tokens the stored state has seen
    begin: tl.tensor  # tokens that the state had seen
    folded: tl.tensor  # inputs of place 0, as an index of `recurrent_inputs`
    fresh: tl.tensor  # inputs of place `pending`, less `pending`


class _Part(NamedTuple):
    """The part of one head that a program computes."""

    head: tl.tensor
    x: tl.tensor  # [D] columns of x, and of the output
    b: tl.tensor  # [N] columns of B
    c: tl.tensor
    n: tl.tensor  # [N] columns of the state
    has_dim: tl.tensor  # [D]
    has_n: tl.tensor  # [N]
    element: tl.tensor  # [D, N] of the layer's state
    has: tl.tensor  # [D, N]
    decay: tl.tensor
    skip: tl.tensor


class _Source(NamedTuple):
    convolved: torch.Tensor
    dt: torch.Tensor


@triton.jit
def _part_of(
    head, split, decay, skip,
    HEADS: tl.constexpr, DIM: tl.constexpr, N: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr,
    N_TILE: tl.constexpr,
):
    dim = split * TILE + tl.arange(0, TILE)
    n = tl.arange(0, N_TILE)
    has_dim, has_n = dim < DIM, n < N
    x = head * DIM + dim
    b = HEADS * DIM + head // (HEADS // GROUPS) * N + n
    return _Part(
        head, x, b, b + GROUPS * N, n, has_dim, has_n, x[:, None] * N + n[None, :], has_dim[:, None] & has_n[None, :],
        tl.load(decay + head), tl.load(skip + head),
    )


@triton.jit
def _inputs_at(place, end, request, part, source, CONV_DIM: tl.constexpr, HEADS: tl.constexpr):
    """Load x, dt, B and C of the token at a place; zeros from `end` on."""
    is_there = place < end
    index = (tl.where(place < request.pending, request.folded, request.fresh) + place).to(tl.int64)
    row = source.convolved + index * CONV_DIM
    x = tl.load(row + part.x, mask=part.has_dim & is_there, other=0.0)
    b = tl.load(row + part.b, mask=part.has_n & is_there, other=0.0)
    c = tl.load(row + part.c, mask=part.has_n & is_there, other=0.0)
    dt = tl.load(source.dt + index * HEADS + part.head, mask=is_there, other=0.0)
    return x, dt, b, c


@triton.jit
def _walk(
    state, begin, end, request, part, source, out, cells, saves, layer_word, num_pages,
    CONV_DIM: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, N: tl.constexpr, PAGE_WORDS: tl.constexpr,
    FOLD_ONLY: tl.constexpr,
):
    """Apply the tokens at places begin to end - 1 in order; a token's inputs are loaded while the one before it is
    computed. The state is stored where the known tokens end."""
    x, dt, b, c = _inputs_at(begin, end, request, part, source, CONV_DIM, HEADS)
    for place in range(begin, end):
        next_x, next_dt, next_b, next_c = _inputs_at(place + 1, end, request, part, source, CONV_DIM, HEADS)
        state = state * tl.exp(dt * part.decay) + (x * dt)[:, None] * b[None, :]
        if place >= request.pending:
            y = tl.sum(state * c[None, :], axis=1) + x * part.skip
            token_row = (request.start + place - request.pending).to(tl.int64)
            tl.store(out + token_row * (HEADS * DIM) + part.x, y.to(out.dtype.element_ty), mask=part.has_dim)
        if PAGE_WORDS > 0:
            if place < request.stored:
                save_rows(state, request.begin + place + 1, request.index, part.x, part.n, part.has_dim, part.has_n,
                          saves, layer_word, num_pages, N, PAGE_WORDS)
        if not FOLD_ONLY:
            if place + 1 == request.stored:
                tl.store(cells, state, mask=part.has)
        x, dt, b, c = next_x, next_dt, next_b, next_c
    return state


@triton.jit
def _chunk(
    state, place, count, must_finish, request, part, source, out,
    CONV_DIM: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, TOKENS: tl.constexpr, PRECISION: tl.constexpr,
    Y_PRECISION: tl.constexpr,
):
    """Apply `count` known tokens from a place on, at most TOKENS; missing tokens change nothing. Decays are
    exponentials of sums over the tokens between, not of differences of sums from the start. Returns (the new state,
    True), or (the old one, False) if a token is not finite: then outputs before that token are spoilt too, and the
    caller must compute them again. must_finish: return the new state in any case."""
    t = tl.arange(0, TOKENS)
    is_there = t < count
    index = (request.fresh + place + t).to(tl.int64)
    row = source.convolved + index[:, None] * CONV_DIM
    has_x, has_bc = is_there[:, None] & part.has_dim[None, :], is_there[:, None] & part.has_n[None, :]
    x = tl.load(row + part.x[None, :], mask=has_x, other=0.0)
    b = tl.load(row + part.b[None, :], mask=has_bc, other=0.0)
    c = tl.load(row + part.c[None, :], mask=has_bc, other=0.0)
    dt = tl.load(source.dt + index * HEADS + part.head, mask=is_there, other=0.0)
    log_decay, xdt = dt * part.decay, x * dt[:, None]
    is_finite = tl.sum(tl.sum(zero_or_nan(xdt), axis=1) + tl.sum(zero_or_nan(b), axis=1)) == 0.0
    steps = tl.where(t[:, None] > t[None, :], log_decay[:, None], 0.0)
    between = tl.where(t[:, None] >= t[None, :], tl.exp(tl.cumsum(steps, axis=0)), 0.0)
    scores = tl.dot(c, tl.trans(b), input_precision=Y_PRECISION) * between
    since_start = tl.exp(tl.cumsum(log_decay, axis=0))[:, None]
    y = tl.dot(scores, xdt, input_precision=Y_PRECISION)
    y += since_start * tl.dot(c, tl.trans(state), input_precision=Y_PRECISION) + x * part.skip
    token_row = (request.start + place - request.pending + t).to(tl.int64)[:, None]
    tl.store(out + token_row * (HEADS * DIM) + part.x[None, :], y.to(out.dtype.element_ty), mask=has_x)
    to_end = tl.exp(tl.sum(steps, axis=0))[:, None]
    added = tl.dot(tl.trans(xdt * to_end), b, input_precision=PRECISION)
    new = state * tl.exp(tl.sum(log_decay, axis=0)) + added
    return tl.where(is_finite | must_finish, new, state), is_finite


@triton.jit
def _scan(
    state, request, part, source, out, saves, layer_word, num_pages,
    CONV_DIM: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, N: tl.constexpr, TOKENS: tl.constexpr,
    PRECISION: tl.constexpr, Y_PRECISION: tl.constexpr, PAGE_WORDS: tl.constexpr,
):
    """Take the state through all known tokens, in chunks that end at checkpoint boundaries. A chunk with a non-finite
    token is computed again token by token. After that token all results are NaN, and chunks are used again."""
    place, most, is_lost = request.pending, TOKENS, False
    while place < request.stored:
        count = tl.minimum(request.stored - place, most)
        if PAGE_WORDS > 0:
            at = request.begin + place
            count = next_boundary(at, at + count, request.index, saves) - at
        must_finish = is_lost | (most == 1)
        state, is_finite = _chunk(state, place, count, must_finish, request, part, source, out, CONV_DIM, HEADS, DIM,
                                  TOKENS, PRECISION, Y_PRECISION)
        is_lost = is_lost | ((most == 1) & (not is_finite))
        if is_finite | must_finish:
            place += count
            most = tl.where(is_lost, TOKENS, most)
            if PAGE_WORDS > 0:
                save_rows(state, request.begin + place, request.index, part.x, part.n, part.has_dim, part.has_n, saves,
                          layer_word, num_pages, N, PAGE_WORDS)
        else:
            most = 1
            tl.debug_barrier()  # outputs are stored again, by other threads
    return state


@kernel(do_not_specialize=["requests", "tokens", "layer_word"])
def _mamba2_kernel(
    counts, requests, tokens, source, conv_in, conv_stride, gates, gate_strides, states, tail, window, gate_windows,
    decay, skip, out, saves, layer_word, num_pages,
    HEADS: tl.constexpr, DIM: tl.constexpr, N: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr,
    N_TILE: tl.constexpr, SPLITS: tl.constexpr, TOKENS: tl.constexpr, CHUNKED: tl.constexpr, PRECISION: tl.constexpr,
    Y_PRECISION: tl.constexpr, PAGE_WORDS: tl.constexpr, FOLD_ONLY: tl.constexpr, CONV_DIM: tl.constexpr,
    WIDTH: tl.constexpr, WINDOW: tl.constexpr, PARTS: tl.constexpr, CHANNELS: tl.constexpr, TAIL: tl.constexpr,
    DRAFTS: tl.constexpr, MORE_THAN: tl.constexpr, PDL: tl.constexpr,
):
    """Advance some rows of one head's state of one request by a step. MORE_THAN: states of runs with more known tokens
    than this are not updated here; 0: all are."""
    release_dependents(PDL)
    wait_for_inputs(PDL)
    split, head, index = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, start, stop, computed, known, drafts, pending = load_counts(counts, index, requests)
    part = _part_of(head, split, decay, skip, HEADS, DIM, N, GROUPS, TILE, N_TILE)
    live = tl.where(known > 0, known + drafts, 0)
    clear_dead(out, HEADS * DIM, part.x, part.has_dim, index, requests, live, start, stop,
               load_last_stop(counts, requests), tokens)
    if (known > 0) | FOLD_ONLY:
        if MORE_THAN > 0:
            is_here = not is_long_run(known, drafts, pending, MORE_THAN)
        else:
            is_here = True
        fresh = requests * WINDOW + start - pending
        request = _Request(index, start, pending, pending + known, computed - pending, index * WINDOW, fresh)
        if is_here:
            cells = states + row * (HEADS * DIM * N) + part.element
            state = tl.load(cells, mask=part.has, other=0.0)
            total = pending + live
            is_long = CHUNKED & (known > _SHORT_RUN)
            end = tl.where(is_long, pending, total)
            state = _walk(state, 0, end, request, part, source, out, cells, saves, layer_word, num_pages, CONV_DIM,
                          HEADS, DIM, N, PAGE_WORDS, FOLD_ONLY)
            if CHUNKED:
                if is_long:
                    state = _scan(state, request, part, source, out, saves, layer_word, num_pages, CONV_DIM, HEADS, DIM,
                                  N, TOKENS, PRECISION, Y_PRECISION, PAGE_WORDS)
                    tl.store(cells, state, mask=part.has)
                    _walk(state, pending + known, total, request, part, source, out, cells, saves, layer_word,
                          num_pages, CONV_DIM, HEADS, DIM, N, 0, FOLD_ONLY)
        if not FOLD_ONLY:
            kept_tail = load_tail(head * SPLITS + split, row, start, known, pending, True, conv_in, conv_stride, tail,
                                  window, CONV_DIM, WIDTH, WINDOW, PARTS, CHANNELS, TAIL)
            keep_inputs(
                kept_tail, head * SPLITS + split, row, start, known, drafts, conv_in, conv_stride, gates, gate_strides,
                tail, window, gate_windows, CONV_DIM, WIDTH, WINDOW, HEADS, HEADS, 1, PARTS, CHANNELS, TAIL, DRAFTS,
            )


def mamba2_config(requests: int, dim: int, chunked: bool) -> StepConfig:
    """Return the launch configuration of a step, which depends only on the number of requests. Parts of a state are
    small while heads and requests hardly fill the GPU. A thread has 16 elements of the state, so that registers are
    left for several programs at a time."""
    tile = 32 if chunked or requests > 16 else 16
    return StepConfig(min(tile, next_power_of_two(dim)), tile // 4)


def mamba2_steps(
    step: StepTensors, inputs: StepInputs, layer: LayerTensors, decay: torch.Tensor, skip: torch.Tensor, *,
    num_groups: int, targets: CheckpointTargets | None = None, chunked: bool = False, fold_only: bool = False,
    config: StepConfig | None = None, chunk: int = CHUNK, precision: str = "tf32x3",
    y_precision: str | None = None, long_runs: LongRuns | None = None,
) -> torch.Tensor:
    """Advance the rows of a batch by one step, and return y [tokens, heads * dim] in the inputs' dtype; 0 for dead and
    padded token rows. decay (A, below zero) and skip (D) [heads]; groups of heads share B and C. chunked: requests with
    more than SHORT_RUN known tokens go in chunks, those of `long_runs` in chunks side by side. fold_only: the rows have
    ended, so only checkpoints are written."""
    name = "mamba2_steps"
    sizes = check_step(name, step, inputs, layer, targets, gate_sizes=(layer.state.shape[1],))
    heads, dim, n, device = sizes.heads, sizes.dim, sizes.n, layer.state.device
    for argument, tensor in (("decay", decay), ("skip", skip)):
        require_tensor(name, argument, tensor, (heads,), device, (torch.float32,))
    require(heads % num_groups == 0, name, "num_groups", f"is {num_groups} for {heads} heads")
    ok = sizes.conv_dim == heads * dim + 2 * num_groups * n
    require(ok, name, "inputs.conv_in", f"has {sizes.conv_dim} channels, not those of x, B and C")
    out = torch.empty(sizes.tokens, heads * dim, dtype=inputs.conv_in.dtype, device=device)
    if sizes.requests == 0:
        return out.zero_()
    tile, num_warps = config or mamba2_config(sizes.requests, dim, chunked)
    n_tile = next_power_of_two(n)
    if y_precision is None:
        y_precision = "tf32x3" if out.dtype == torch.float32 else "tf32"  # finer than what it is rounded to
    if chunked:  # products have least sizes
        tile, n_tile, chunk = max(16, tile), max(16, n_tile), max(16, chunk)
    splits = cdiv(dim, tile)
    saves, layer_word, num_pages, page_words = save_args(targets, step, layer)
    pdl = uses_pdl(device)
    # Outputs of chunks side by side are made with differences of sums, which 32 bits would show.
    runs = long_runs or LongRuns()
    has_long_runs = chunked and out.dtype != torch.float32 and sizes.tokens > runs.more_than
    if has_long_runs:
        scan_long_runs(step.counts, inputs.convolved, inputs.wide_gates[0], layer.state, decay, skip, out,
                       (saves, layer_word, num_pages, page_words), runs, tokens=sizes.tokens, num_groups=num_groups,
                       window=sizes.window, y_precision=y_precision, pdl=pdl)
    _mamba2_kernel[(splits, heads, sizes.requests)](
        step.counts, sizes.requests, sizes.tokens, _Source(inputs.convolved, inputs.wide_gates[0]), inputs.conv_in,
        inputs.conv_in.stride(0), inputs.gates, tuple(g.stride(0) for g in inputs.gates), layer.state, layer.tail,
        layer.conv_in, layer.gates, decay, skip, out, saves, layer_word, num_pages,
        HEADS=heads, DIM=dim, N=n, GROUPS=num_groups, TILE=tile, N_TILE=n_tile, SPLITS=splits, TOKENS=chunk,
        CHUNKED=chunked, PRECISION=precision, Y_PRECISION=y_precision, PAGE_WORDS=page_words, FOLD_ONLY=fold_only,
        **keep_sizes(sizes, heads * splits), MORE_THAN=runs.more_than if has_long_runs else 0, PDL=pdl,
        num_warps=num_warps, **pdl_options(pdl),
    )
    return out
