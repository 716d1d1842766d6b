"""Mamba-2 over the long runs of a batch, in chunks that are computed side by side: three launches per layer.

The first launch computes what the tokens of each chunk add to the state. The second goes through a request's chunks in
order, and replaces what a chunk adds with the state before that chunk. The third computes the outputs and the
checkpoints of each chunk. `mamba2_scan` in `kernels/recurrent.py` is the specification. Chunks are counted from the
first known token of the step, so a request's results do not depend on its batch mates. Non-finite tokens are masked by
selection in products for earlier tokens, because 0 x NaN is NaN.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from outrider.kernels.gpu.common import (
    cdiv,
    next_power_of_two,
    padded_requests,
    pdl_options,
    release_dependents,
    wait_for_inputs,
)
from outrider.kernels.gpu.launch.triton_kernel import kernel
from outrider.kernels.gpu.pages.cache_write import contained_values, zero_or_nan
from outrider.kernels.gpu.recurrent.step_tensors import load_counts, save_rows


class LongRuns(NamedTuple):
    """The choice of runs that are computed in chunks side by side, and the sizes of the chunks."""

    chunk: int = 128  # tokens
    more_than: int = 128  # known tokens of a request, without drafts before or behind them
    add_heads: int = 4  # most heads of a program; all of them have the same B and C
    add_warps: int = 4
    output_heads: int = 8
    output_warps: int = 8

    def max_chunks(self, tokens: int) -> int:
        """Return the most chunks that a batch with this many token rows can have."""
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
                D_TILE: tl.constexpr, N_TILE: tl.constexpr):
    dim, n = first_dim + tl.arange(0, D_TILE), tl.arange(0, N_TILE)
    has_dim, has_n = dim < DIM, n < N
    b = HEADS * DIM + head // (HEADS // GROUPS) * N + n
    return Columns(head * DIM + dim, b, b + GROUPS * N, n, has_dim, has_n, dim[:, None] * N + n[None, :],
                   has_dim[:, None] & has_n[None, :])


@triton.jit
def is_long_run(known, drafts, pending, MORE_THAN: tl.constexpr):
    return (known > MORE_THAN) & (drafts == 0) & (pending == 0)


@triton.jit
def _chunks_of(counts, requests, CHUNK: tl.constexpr, MORE_THAN: tl.constexpr, PAD: tl.constexpr):
    """Return the number of chunks of every request."""
    index = tl.arange(0, PAD)
    known = tl.load(counts + 4 * requests + index, mask=index < requests, other=0).to(tl.int32)
    drafts = tl.load(counts + 5 * requests + index, mask=index < requests, other=0).to(tl.int32)
    pending = tl.load(counts + 6 * requests + index, mask=index < requests, other=0).to(tl.int32)
    return tl.where(is_long_run(known, drafts, pending, MORE_THAN), (known + CHUNK - 1) // CHUNK, 0)


@triton.jit
def _first_chunk(counts, request, requests, CHUNK: tl.constexpr, MORE_THAN: tl.constexpr, PAD: tl.constexpr):
    """Return the number of a request's first chunk among the chunks of all requests."""
    chunks = _chunks_of(counts, requests, CHUNK, MORE_THAN, PAD)
    return tl.sum(tl.where(tl.arange(0, PAD) < request, chunks, 0), axis=0)


@triton.jit
def _find_chunk(counts, number, requests, CHUNK: tl.constexpr, MORE_THAN: tl.constexpr, PAD: tl.constexpr):
    """Return (request, index of its chunk) of the chunk with this number. If there are fewer chunks, the request is
    past the last one."""
    chunks = _chunks_of(counts, requests, CHUNK, MORE_THAN, PAD)
    request = tl.sum((tl.cumsum(chunks, axis=0) <= number).to(tl.int32), axis=0)
    return tl.minimum(request, requests), number - tl.sum(tl.where(tl.arange(0, PAD) < request, chunks, 0), axis=0)


@triton.jit
def _tokens_of_chunk(
    convolved, requests, start, known, chunk, CHUNK: tl.constexpr, WINDOW: tl.constexpr, CONV_DIM: tl.constexpr
):
    """Return the tokens of a chunk: (how many, their numbers [CHUNK], which exist, their rows in the step's inputs,
    pointers [CHUNK, 1] to their convolved inputs)."""
    count = tl.minimum(known - chunk * CHUNK, CHUNK)
    t = tl.arange(0, CHUNK)
    is_there = t < count
    index = (requests * WINDOW + start + chunk * CHUNK + t).to(tl.int64)
    return count, t, is_there, index, convolved + index[:, None] * CONV_DIM


@triton.jit
def _weights_to_end(dt, next_dt, decay):
    """Return dt times the share of a token's addition that is left after the last token. next_dt: dt of the token after
    each; 0 after the last one."""
    return dt * tl.exp(tl.cumsum(next_dt * decay, axis=0, reverse=True))


@triton.jit
def _half_terms(x):
    """Split x * scale into the sum of two float16 matrices, exact to 22 bits or 2^-25 of the largest element; also
    returns the scale, a power of two. Non-finite numbers stay so in the first matrix."""
    largest = tl.max(tl.max(tl.abs(x), axis=1), axis=0)
    scale = tl.exp2(-tl.ceil(tl.log2(tl.minimum(tl.maximum(largest, 1e-30), 1e30))))
    x *= scale
    high = x.to(tl.float16)
    return high, (x - high.to(tl.float32)).to(tl.float16), scale


@triton.jit
def _dot_of_halves(a, b, b_low, b_scale):
    """Multiply a with b, which is given as its `_half_terms`. Tensor cores are twice as fast with float16 as with
    tf32."""
    a, a_low, a_scale = _half_terms(a)
    total = tl.dot(a, b_low)
    total = tl.dot(a_low, b, total)
    return tl.dot(a, b, total) / a_scale / b_scale


@kernel(do_not_specialize=["requests"])
def _add_kernel(
    counts, requests, convolved, dt, decay, added, kept,
    HEADS: tl.constexpr, DIM: tl.constexpr, N: tl.constexpr, GROUPS: tl.constexpr, D_TILE: tl.constexpr,
    N_TILE: tl.constexpr, CHUNK: tl.constexpr, MORE_THAN: tl.constexpr, PAD: tl.constexpr, WINDOW: tl.constexpr,
    CONV_DIM: tl.constexpr, OWN: tl.constexpr, PDL: tl.constexpr,
):
    """Compute each chunk's addition to the states of OWN heads, and the factors by which it scales the previous state.
    B, which these heads share, is read once."""
    release_dependents(PDL)
    wait_for_inputs(PDL)
    first_head, number = tl.program_id(0) * OWN, tl.program_id(1)
    request, chunk = _find_chunk(counts, number, requests, CHUNK, MORE_THAN, PAD)
    if request < requests:
        row, start, stop, computed, known, drafts, pending = load_counts(counts, request, requests)
        shared = _columns_of(first_head, 0, HEADS, DIM, N, GROUPS, D_TILE, N_TILE)
        count, t, is_there, index, at = _tokens_of_chunk(
            convolved, requests, start, known, chunk, CHUNK, WINDOW, CONV_DIM
        )
        b = tl.load(at + shared.b[None, :], mask=is_there[:, None] & shared.has_n[None, :], other=0.0)
        b, b_low, b_scale = _half_terms(b)
        for head in tl.range(first_head, first_head + OWN, num_stages=1):
            columns = _columns_of(head, 0, HEADS, DIM, N, GROUPS, D_TILE, N_TILE)
            factor = tl.load(decay + head)
            step = tl.load(dt + index * HEADS + head, mask=is_there, other=0.0)
            next_step = tl.load(dt + (index + 1) * HEADS + head, mask=t + 1 < count, other=0.0)
            x = tl.load(at + columns.x[None, :], mask=is_there[:, None] & columns.has_dim[None, :], other=0.0)
            x *= _weights_to_end(step, next_step, factor)[:, None]
            total = _dot_of_halves(tl.trans(x), b, b_low, b_scale)
            place = (number * HEADS + head).to(tl.int64)
            tl.store(added + place * (DIM * N) + columns.element, total, mask=columns.has)
            tl.store(kept + place, tl.exp(tl.sum(step * factor, axis=0)))


@kernel(do_not_specialize=["requests"])
def _pass_kernel(
    counts, requests, states, added, kept,
    HEADS: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, MORE_THAN: tl.constexpr,
    PAD: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):
    """Replace the addition of each chunk by the state before it, and store the state after the last chunk in the row.
    SIZE: elements of one head's state."""
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
    CONV_DIM: tl.constexpr, OWN: tl.constexpr, Y_PRECISION: tl.constexpr, PAGE_WORDS: tl.constexpr, PDL: tl.constexpr,
):
    """Compute the outputs of a chunk's tokens for OWN heads, which share B and C. Also save the states inside the
    chunk."""
    release_dependents(PDL)
    wait_for_inputs(PDL)
    first_head, number = tl.program_id(0) * OWN, tl.program_id(1)
    request, chunk = _find_chunk(counts, number, requests, CHUNK, MORE_THAN, PAD)
    if request < requests:
        row, start, stop, computed, known, drafts, pending = load_counts(counts, request, requests)
        shared = _columns_of(first_head, 0, HEADS, DIM, N, GROUPS, D_TILE, N_TILE)
        count, t, is_there, index, at = _tokens_of_chunk(
            convolved, requests, start, known, chunk, CHUNK, WINDOW, CONV_DIM
        )
        has_bc = is_there[:, None] & shared.has_n[None, :]
        c = tl.load(at + shared.c[None, :], mask=has_bc, other=0.0)
        b = tl.load(at + shared.b[None, :], mask=has_bc, other=0.0)
        is_before = t[:, None] >= t[None, :]
        products = tl.where(is_before, tl.dot(c, tl.trans(b), input_precision=Y_PRECISION), 0.0)
        token = (start + chunk * CHUNK + t).to(tl.int64)[:, None]
        for head in tl.range(first_head, first_head + OWN, num_stages=1):
            columns = _columns_of(head, 0, HEADS, DIM, N, GROUPS, D_TILE, N_TILE)
            has_x = is_there[:, None] & columns.has_dim[None, :]
            factor = tl.load(decay + head)
            step = tl.load(dt + index * HEADS + head, mask=is_there, other=0.0)
            x = tl.load(at + columns.x[None, :], mask=has_x, other=0.0)
            cells = before + (number * HEADS + head).to(tl.int64) * (DIM * N) + columns.element
            state = tl.load(cells, mask=columns.has, other=0.0)
            since = tl.cumsum(step * factor, axis=0)
            scores = products * tl.exp(tl.where(is_before, since[:, None] - since[None, :], 0.0))
            xdt = x * step[:, None]
            y = tl.dot(c, tl.trans(state), input_precision=Y_PRECISION) * tl.exp(since)[:, None]
            y = tl.dot(scores, contained_values(xdt), y, input_precision=Y_PRECISION) + x * tl.load(skip + head)
            if tl.sum(zero_or_nan(xdt)) != 0.0:  # what was not finite fails its token and those after it
                y += tl.cumsum(zero_or_nan(xdt), axis=0)
            tl.store(out + token * (HEADS * DIM) + columns.x[None, :], y.to(out.dtype.element_ty), mask=has_x)
        if PAGE_WORDS > 0:
            begin = computed + chunk * CHUNK
            for target in range(tl.load(saves.starts + request), tl.load(saves.starts + request + 1)):
                seen = tl.load(saves.boundary + target).to(tl.int32) - begin  # tokens of the chunk before the boundary
                if (seen > 0) & (seen <= count):
                    for head in range(first_head, first_head + OWN):
                        _save_checkpoint(head, seen, begin, request, number, t, index, at, dt, decay, before, saves,
                                         layer_word, num_pages, HEADS, DIM, N, GROUPS, D_TILE, N_TILE,
                                         PAGE_WORDS)


@triton.jit
def _save_checkpoint(
    head, seen, begin, request, number, t, index, at, dt, decay, before, saves, layer_word, num_pages,
    HEADS: tl.constexpr, DIM: tl.constexpr, N: tl.constexpr, GROUPS: tl.constexpr, D_TILE: tl.constexpr,
    N_TILE: tl.constexpr, PAGE_WORDS: tl.constexpr,
):
    """Save one head's state after `seen` tokens of a chunk."""
    columns = _columns_of(head, 0, HEADS, DIM, N, GROUPS, D_TILE, N_TILE)
    is_seen = (t < seen)[:, None]
    x = tl.load(at + columns.x[None, :], mask=is_seen & columns.has_dim[None, :], other=0.0)
    b = tl.load(at + columns.b[None, :], mask=is_seen & columns.has_n[None, :], other=0.0)
    step = tl.load(dt + index * HEADS + head, mask=t < seen, other=0.0)
    next_step = tl.load(dt + (index + 1) * HEADS + head, mask=t + 1 < seen, other=0.0)
    factor = tl.load(decay + head)
    cells = before + (number * HEADS + head).to(tl.int64) * (DIM * N) + columns.element
    state = tl.load(cells, mask=columns.has, other=0.0) * tl.exp(tl.sum(step * factor, axis=0))
    x *= _weights_to_end(step, next_step, factor)[:, None]
    b, b_low, b_scale = _half_terms(b)
    state += _dot_of_halves(tl.trans(x), b, b_low, b_scale)
    save_rows(state, begin + seen, request, columns.x, columns.n, columns.has_dim, columns.has_n, saves, layer_word,
              num_pages, N, PAGE_WORDS)


def scan_long_runs(
    counts: torch.Tensor, convolved: torch.Tensor, dt: torch.Tensor, states: torch.Tensor, decay: torch.Tensor,
    skip: torch.Tensor, out: torch.Tensor, saves: tuple[NamedTuple, int, int, int], runs: LongRuns, *, tokens: int,
    num_groups: int, window: int, y_precision: str, pdl: bool,
) -> None:
    """Advance the rows with long runs, and write their token rows of `out`; `mamba2_steps` has checked the arguments.
    saves: the result of `save_args`."""
    requests, (heads, dim, n), device = counts.shape[1], states.shape[1:], states.device
    pointers, layer_word, num_pages, page_words = saves
    max_chunks = runs.max_chunks(tokens)
    added = torch.empty(max_chunks, heads, dim, n, dtype=torch.float32, device=device)
    kept = torch.empty(max_chunks, heads, dtype=torch.float32, device=device)
    d_tile, n_tile = max(16, next_power_of_two(dim)), max(16, next_power_of_two(n))
    options = {"CHUNK": runs.chunk, "MORE_THAN": runs.more_than, "PAD": padded_requests(requests),
               "PDL": pdl, **pdl_options(pdl)}
    shape = {"HEADS": heads, "DIM": dim, "N": n, "GROUPS": num_groups, "D_TILE": d_tile, "N_TILE": n_tile,
             "WINDOW": window, "CONV_DIM": convolved.shape[1]}
    add_heads, output_heads = (math.gcd(most, heads // num_groups) for most in (runs.add_heads, runs.output_heads))
    _add_kernel[(heads // add_heads, max_chunks)](
        counts, requests, convolved, dt, decay, added, kept, **shape, OWN=add_heads,
        num_warps=runs.add_warps, **options,
    )
    tile = min(1024, next_power_of_two(dim * n))
    _pass_kernel[(cdiv(dim * n, tile), heads, requests)](
        counts, requests, states, added, kept, HEADS=heads, SIZE=dim * n, TILE=tile, STAGES=4, num_warps=4, **options
    )
    _output_kernel[(heads // output_heads, max_chunks)](
        counts, requests, convolved, dt, decay, skip, added, out, pointers, layer_word, num_pages, **shape,
        OWN=output_heads, Y_PRECISION=y_precision, PAGE_WORDS=page_words,
        num_warps=runs.output_warps, **options,
    )
