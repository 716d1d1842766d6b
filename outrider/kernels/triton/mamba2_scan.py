"""Mamba-2 over the long runs of a batch, in chunks that are computed side by side: three launches per layer.

The first computes what the tokens of each chunk add to the state, the second goes through a request's chunks in their
order and puts the state before each chunk in the place of what the chunk adds, the third computes the outputs and the
checkpoints of each chunk. `mamba2_scan` in `kernels/recurrent.py` is the specification. Chunks are counted from the
first known token of the step, so a request's results do not depend on its batch mates. A token that is not finite is
selected away in the products of the tokens before it, because 0 x NaN is NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

import triton
import triton.language as tl
from outrider.kernels.triton.cache_write import contained_values, zero_or_nan
from outrider.kernels.triton.common import cdiv, next_power_of_two, pdl_options, release_dependents, wait_for_inputs
from outrider.kernels.triton.launch import kernel
from outrider.kernels.triton.recurrent_step import load_counts, save_rows


class LongRuns(NamedTuple):
    """Which runs are computed this way, and how."""

    chunk: int = 128  # tokens
    more_than: int = 128  # known tokens of a request, without drafts before or behind them
    add_splits: int = 2  # programs that share the rows of a head's state
    add_block: int = 32  # tokens that are added to the state at once
    add_stages: int = 2
    add_warps: int = 4
    output_warps: int = 8

    def max_chunks(self, tokens: int) -> int:
        """The most chunks that a batch of so many token rows can have."""
        return tokens // self.chunk + tokens // (self.more_than + 1)


class Columns(NamedTuple):
    """One head's columns of the convolved inputs and of the state."""

    x: tl.tensor  # [D]
    b: tl.tensor  # [N]
    c: tl.tensor  # [N]
    n: tl.tensor  # [N] of the state
    has_dim: tl.tensor  # [D]
    has_n: tl.tensor  # [N]
    element: tl.tensor  # [D, N] of the head's state
    has: tl.tensor  # [D, N]


@triton.jit
def _columns_of(head, first_dim, HEADS: tl.constexpr, DIM: tl.constexpr, N: tl.constexpr, GROUPS: tl.constexpr,
                D_TILE: tl.constexpr, N_TILE: tl.constexpr):  # fmt: skip
    dim, n = first_dim + tl.arange(0, D_TILE), tl.arange(0, N_TILE)
    has_dim, has_n = dim < DIM, n < N
    b = HEADS * DIM + head // (HEADS // GROUPS) * N + n
    return Columns(head * DIM + dim, b, b + GROUPS * N, n, has_dim, has_n, dim[:, None] * N + n[None, :],
                   has_dim[:, None] & has_n[None, :])  # fmt: skip


@triton.jit
def is_long_run(known, drafts, pending, MORE_THAN: tl.constexpr):
    return (known > MORE_THAN) & (drafts == 0) & (pending == 0)


@triton.jit
def _chunks_of(counts, requests, CHUNK: tl.constexpr, MORE_THAN: tl.constexpr, PAD: tl.constexpr):
    """Chunks of every request."""
    index = tl.arange(0, PAD)
    known = tl.load(counts + 4 * requests + index, mask=index < requests, other=0).to(tl.int32)
    drafts = tl.load(counts + 5 * requests + index, mask=index < requests, other=0).to(tl.int32)
    pending = tl.load(counts + 6 * requests + index, mask=index < requests, other=0).to(tl.int32)
    return tl.where(is_long_run(known, drafts, pending, MORE_THAN), (known + CHUNK - 1) // CHUNK, 0)


@triton.jit
def _first_chunk(counts, request, requests, CHUNK: tl.constexpr, MORE_THAN: tl.constexpr, PAD: tl.constexpr):
    """Number of a request's first chunk among those of all requests."""
    chunks = _chunks_of(counts, requests, CHUNK, MORE_THAN, PAD)
    return tl.sum(tl.where(tl.arange(0, PAD) < request, chunks, 0), axis=0)


@triton.jit
def _find_chunk(counts, number, requests, CHUNK: tl.constexpr, MORE_THAN: tl.constexpr, PAD: tl.constexpr):
    """(request, chunk of it) of the chunk of this number; the request is past the last one if there are fewer."""
    chunks = _chunks_of(counts, requests, CHUNK, MORE_THAN, PAD)
    request = tl.sum((tl.cumsum(chunks, axis=0) <= number).to(tl.int32), axis=0)
    return tl.minimum(request, requests), number - tl.sum(tl.where(tl.arange(0, PAD) < request, chunks, 0), axis=0)


@triton.jit
def _weights_to_end(dt, next_dt, decay, after):
    """dt times what is left of a token's addition after the block's last token and `after`, the logarithm of what comes
    behind the block. next_dt: of the tokens after each, 0 behind the last one."""
    return dt * tl.exp(after + tl.cumsum(next_dt * decay, axis=0, reverse=True))


@kernel(do_not_specialize=["requests"])
def _add_kernel(
    counts, requests, convolved, dt, decay, added, kept,
    HEADS: tl.constexpr, DIM: tl.constexpr, N: tl.constexpr, GROUPS: tl.constexpr, D_TILE: tl.constexpr,
    N_TILE: tl.constexpr, CHUNK: tl.constexpr, MORE_THAN: tl.constexpr, PAD: tl.constexpr, WINDOW: tl.constexpr,
    CONV_DIM: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Computes the sum that a chunk adds to a state, and the factor by which the chunk scales the state before it.
    SPLITS programs share the rows of a head; BLOCK tokens are added at once."""
    release_dependents(PDL)
    wait_for_inputs(PDL)
    head, number = tl.program_id(0) // SPLITS, tl.program_id(1)
    request, chunk = _find_chunk(counts, number, requests, CHUNK, MORE_THAN, PAD)
    if request < requests:
        row, start, stop, computed, known, drafts, pending = load_counts(counts, request, requests)
        columns = _columns_of(head, tl.program_id(0) % SPLITS * D_TILE, HEADS, DIM, N, GROUPS, D_TILE, N_TILE)
        factor = tl.load(decay + head)
        first = requests * WINDOW + start + chunk * CHUNK
        count = tl.minimum(known - chunk * CHUNK, CHUNK)
        every = tl.arange(0, CHUNK)
        steps = tl.load(dt + (first + every).to(tl.int64) * HEADS + head, mask=every < count, other=0.0)
        total = tl.zeros([D_TILE, N_TILE], dtype=tl.float32)
        for begin in tl.range(0, CHUNK, BLOCK, num_stages=STAGES):
            place = tl.arange(0, BLOCK)
            t = begin + place
            is_there = t < count
            index = (first + t).to(tl.int64)
            at = convolved + index[:, None] * CONV_DIM
            x = tl.load(at + columns.x[None, :], mask=is_there[:, None] & columns.has_dim[None, :], other=0.0)
            b = tl.load(at + columns.b[None, :], mask=is_there[:, None] & columns.has_n[None, :], other=0.0)
            step = tl.load(dt + index * HEADS + head, mask=is_there, other=0.0)
            has_next = (t + 1 < count) & (place + 1 < BLOCK)
            next_step = tl.load(dt + (index + 1) * HEADS + head, mask=has_next, other=0.0)
            after = tl.sum(tl.where(every >= begin + BLOCK, steps, 0.0) * factor, axis=0)
            x *= _weights_to_end(step, next_step, factor, after)[:, None]
            total = tl.dot(tl.trans(x), b, total, input_precision=PRECISION)
        place = (number * HEADS + head).to(tl.int64)
        tl.store(added + place * (DIM * N) + columns.element, total, mask=columns.has)
        if tl.program_id(0) % SPLITS == 0:
            tl.store(kept + place, tl.exp(tl.sum(steps * factor, axis=0)))


@kernel(do_not_specialize=["requests"])
def _pass_kernel(
    counts, requests, states, added, kept,
    HEADS: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, MORE_THAN: tl.constexpr,
    PAD: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The state before each chunk, in the place of what the chunk adds; the state after the last one to the row. SIZE:
    elements of one head's state."""
    release_dependents(PDL)
    wait_for_inputs(PDL)
    head, request = tl.program_id(1), tl.program_id(2)
    row, start, stop, computed, known, drafts, pending = load_counts(counts, request, requests)
    if is_long_run(known, drafts, pending, MORE_THAN):
        element = tl.program_id(0) * TILE + tl.arange(0, TILE)
        valid = element < SIZE
        cells = states + row * (HEADS * SIZE) + head * SIZE + element
        first = _first_chunk(counts, request, requests, CHUNK, MORE_THAN, PAD)
        state = tl.load(cells, mask=valid, other=0.0)
        for chunk in tl.range(0, (known + CHUNK - 1) // CHUNK, num_stages=STAGES):
            place = ((first + chunk) * HEADS + head).to(tl.int64)
            at = added + place * SIZE + element
            more = tl.load(at, mask=valid, other=0.0)
            share = tl.load(kept + place)
            tl.store(at, state, mask=valid)
            state = state * share + more
        tl.store(cells, state, mask=valid)


@kernel(do_not_specialize=["requests", "layer_word"])
def _output_kernel(
    counts, requests, convolved, dt, decay, skip, before, out, saves, layer_word, num_pages,
    HEADS: tl.constexpr, DIM: tl.constexpr, N: tl.constexpr, GROUPS: tl.constexpr, D_TILE: tl.constexpr,
    N_TILE: tl.constexpr, CHUNK: tl.constexpr, MORE_THAN: tl.constexpr, PAD: tl.constexpr, WINDOW: tl.constexpr,
    CONV_DIM: tl.constexpr, PRECISION: tl.constexpr, Y_PRECISION: tl.constexpr, PAGE_WORDS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Outputs of a chunk's tokens, and the checkpoints that lie in it."""
    release_dependents(PDL)
    wait_for_inputs(PDL)
    head, number = tl.program_id(0), tl.program_id(1)
    request, chunk = _find_chunk(counts, number, requests, CHUNK, MORE_THAN, PAD)
    if request < requests:
        row, start, stop, computed, known, drafts, pending = load_counts(counts, request, requests)
        columns = _columns_of(head, 0, HEADS, DIM, N, GROUPS, D_TILE, N_TILE)
        factor = tl.load(decay + head)
        first = requests * WINDOW + start + chunk * CHUNK
        count = tl.minimum(known - chunk * CHUNK, CHUNK)
        t = tl.arange(0, CHUNK)
        is_there = t < count
        index = (first + t).to(tl.int64)
        at = convolved + index[:, None] * CONV_DIM
        has_x, has_bc = is_there[:, None] & columns.has_dim[None, :], is_there[:, None] & columns.has_n[None, :]
        step = tl.load(dt + index * HEADS + head, mask=is_there, other=0.0)
        c = tl.load(at + columns.c[None, :], mask=has_bc, other=0.0)
        b = tl.load(at + columns.b[None, :], mask=has_bc, other=0.0)
        x = tl.load(at + columns.x[None, :], mask=has_x, other=0.0)
        cells = before + (number * HEADS + head).to(tl.int64) * (DIM * N) + columns.element
        state = tl.load(cells, mask=columns.has, other=0.0)
        since = tl.cumsum(step * factor, axis=0)
        is_before = t[:, None] >= t[None, :]
        between = tl.exp(tl.where(is_before, since[:, None] - since[None, :], 0.0))
        scores = tl.dot(c, tl.trans(b), input_precision=Y_PRECISION) * between
        scores = tl.where(is_before, scores, 0.0)
        xdt = x * step[:, None]
        y = tl.dot(c, tl.trans(state), input_precision=Y_PRECISION) * tl.exp(since)[:, None]
        y = tl.dot(scores, contained_values(xdt), y, input_precision=Y_PRECISION) + x * tl.load(skip + head)
        if tl.sum(zero_or_nan(xdt)) != 0.0:  # what was not finite fails its token and those after it
            y += tl.cumsum(zero_or_nan(xdt), axis=0)
        token = (start + chunk * CHUNK + t).to(tl.int64)[:, None]
        tl.store(out + token * (HEADS * DIM) + columns.x[None, :], y.to(out.dtype.element_ty), mask=has_x)
        if PAGE_WORDS > 0:
            begin = computed + chunk * CHUNK
            for target in range(tl.load(saves.starts + request), tl.load(saves.starts + request + 1)):
                seen = tl.load(saves.boundary + target).to(tl.int32) - begin  # tokens of the chunk before the boundary
                if (seen > 0) & (seen <= count):
                    own = tl.where(t < seen, step, 0.0)
                    next_own = tl.load(dt + (index + 1) * HEADS + head, mask=t + 1 < seen, other=0.0)
                    weighed = tl.where(t[:, None] < seen, x, 0.0) * _weights_to_end(own, next_own, factor, 0.0)[:, None]
                    saved = state * tl.exp(tl.sum(own * factor, axis=0))
                    seen_b = tl.where(t[:, None] < seen, b, 0.0)
                    saved = tl.dot(tl.trans(weighed), seen_b, saved, input_precision=PRECISION)
                    save_rows(saved, begin + seen, request, columns.x, columns.n, columns.has_dim, columns.has_n, saves,
                              layer_word, num_pages, N, PAGE_WORDS)  # fmt: skip


def scan_long_runs(
    counts: torch.Tensor, convolved: torch.Tensor, dt: torch.Tensor, states: torch.Tensor, decay: torch.Tensor,
    skip: torch.Tensor, out: torch.Tensor, saves: tuple[NamedTuple, int, int, int], runs: LongRuns, *, tokens: int,
    num_groups: int, window: int, precision: str, y_precision: str, pdl: bool,
) -> None:
    """Moves the rows with long runs on and writes their token rows of `out`; arguments as `mamba2_steps` has checked
    them. saves: what `save_args` gives."""
    requests, (heads, dim, n), device = counts.shape[1], states.shape[1:], states.device
    pointers, layer_word, num_pages, page_words = saves
    max_chunks = runs.max_chunks(tokens)
    added = torch.empty(max_chunks, heads, dim, n, dtype=torch.float32, device=device)
    kept = torch.empty(max_chunks, heads, dtype=torch.float32, device=device)
    d_tile, n_tile = max(16, next_power_of_two(dim)), max(16, next_power_of_two(n))
    options = {"CHUNK": runs.chunk, "MORE_THAN": runs.more_than, "PAD": max(256, next_power_of_two(requests)),
               "PDL": pdl, **pdl_options(pdl)}
    shape = {"HEADS": heads, "DIM": dim, "N": n, "GROUPS": num_groups, "D_TILE": d_tile, "N_TILE": n_tile,
             "WINDOW": window, "CONV_DIM": convolved.shape[1]}  # fmt: skip
    splits = min(runs.add_splits, d_tile // 16)
    _add_kernel[(heads * splits, max_chunks)](
        counts, requests, convolved, dt, decay, added, kept, **(shape | {"D_TILE": d_tile // splits}),
        PRECISION=precision, SPLITS=splits, BLOCK=min(runs.add_block, runs.chunk), STAGES=runs.add_stages,
        num_warps=runs.add_warps, **options,
    )
    tile = min(1024, next_power_of_two(dim * n))
    _pass_kernel[(cdiv(dim * n, tile), heads, requests)](
        counts, requests, states, added, kept, HEADS=heads, SIZE=dim * n, TILE=tile, STAGES=4, num_warps=4, **options
    )
    _output_kernel[(heads, max_chunks)](
        counts, requests, convolved, dt, decay, skip, added, out, pointers, layer_word, num_pages, **shape,
        PRECISION=precision, Y_PRECISION=y_precision, PAGE_WORDS=page_words, num_warps=runs.output_warps,
        **options,
    )
