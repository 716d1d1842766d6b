"""Chooses the top-k positions of many token rows (prompts) for sparse attention: after a kernel has computed scores,
one program finds the best scores of one token row.

The program keeps its token row's scores in registers, as integers in the same order, and narrows the range that
contains the least chosen score until as many scores are at or above it as are to be chosen. Each launch serves contexts
up to one size, so that many short ones run at the same time; contexts too long for registers are searched in memory.
Another kernel, which needs few registers, then reads the scores again and writes the chosen positions in order. No
result depends on the order in which programs run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton import knobs

from outrider.kernels.gpu.hopper.index import launch_scores
from outrider.kernels.gpu.index.choice import check_choice
from outrider.kernels.gpu.index.search import ALIGNED, guess_between, load_orders, narrow, ordered
from outrider.kernels.gpu.launch.triton_kernel import kernel
from outrider.kernels.latent import NOT_CHOSEN, TokenContexts

MAX_SCORES = 1 << 27  # that exist at a time
SIZES = (8192, 16384, 32768)  # positions that programs keep in registers
PER_THREAD, MAX_REGISTERS = 64, 128  # of them in each thread, and of registers: a multiprocessor then holds 32768
SEGMENT, WRITTEN = 4096, 1024  # positions that are read from memory at a time, to search and to write them
_NONE = tl.constexpr(NOT_CHOSEN)
_INTS = ["first", "stop", "found", "chosen"]
_VARYING, _FIXED = ["top_k", "above"], ["top_k"]


@triton.jit
def _is_chosen(position, order, least, last):
    """Whether a score is above the least chosen one, or equal to it at a position not after the last one chosen."""
    return (order > least) | ((order == least) & (position <= last))


@kernel(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_INTS)
def _search_kernel(
    first, stop, scores, found, scores_stride, top_k, above,
    SIZE: tl.constexpr,
):
    """Find the least chosen score of one token row, with its scores in registers. Serves token rows that must choose
    and see more than `above` positions, but no more than SIZE."""
    row = tl.program_id(0).to(tl.int64)
    low = tl.load(first + row).to(tl.int32)
    high = tl.load(stop + row).to(tl.int32)
    begin = low // ALIGNED * ALIGNED
    if (high - low > top_k) & (high - begin > above) & (high - begin <= SIZE):
        position, is_visible, order = load_orders(scores + row * scores_stride, begin, low, high, SIZE)
        top = tl.max(order, axis=0)
        bottom = tl.min(tl.where(is_visible, order, 2147483647), axis=0)
        not_below, above_top, turn = high - low, 0, 0
        while bottom < top:
            guess = guess_between(bottom, top, not_below, above_top, top_k, turn)
            enough = tl.sum((order >= guess).to(tl.int32), axis=0)
            bottom, top, not_below, above_top = narrow(bottom, top, not_below, above_top, guess, enough,
                                                        top_k, top_k)
            turn += 1
        start, end = low, high - 1
        if not_below > top_k:  # more are equal to the least one than are missing
            missing = top_k - tl.sum((order > bottom).to(tl.int32), axis=0)
            while start < end:
                half = start + (end - start) // 2
                enough = tl.sum(((order == bottom) & (position <= half)).to(tl.int32), axis=0)
                end = tl.where(enough >= missing, half, end)
                start = tl.where(enough >= missing, start, half + 1)
        tl.store(found + 2 * row, bottom)
        tl.store(found + 2 * row + 1, end)


@triton.jit
def _count_in_memory(own, begin, low, high, least, last, SEG: tl.constexpr):
    total = 0
    for start in tl.range(begin, high, SEG, num_stages=3):
        position, is_visible, order = load_orders(own, start, low, high, SEG)
        total += tl.sum((is_visible & _is_chosen(position, order, least, last)).to(tl.int32), axis=0)
    return total


@kernel(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_INTS)
def _search_in_memory_kernel(
    first, stop, scores, found, scores_stride, top_k, above, SEG: tl.constexpr,
):
    """Find the least chosen score of one token row whose scores do not fit into registers. Serves token rows that must
    choose and see more than `above` positions."""
    row = tl.program_id(0).to(tl.int64)
    low = tl.load(first + row).to(tl.int32)
    high = tl.load(stop + row).to(tl.int32)
    begin = low // ALIGNED * ALIGNED
    own = scores + row * scores_stride
    if (high - begin > above) & (high - low > top_k):
        top, bottom = -2147483648, 2147483647
        for at in tl.range(begin, high, SEG, num_stages=3):
            position, is_visible, order = load_orders(own, at, low, high, SEG)
            top = tl.maximum(top, tl.max(order, axis=0))
            bottom = tl.minimum(bottom, tl.min(tl.where(is_visible, order, 2147483647), axis=0))
        not_below, above_top, turn = high - low, 0, 0
        while bottom < top:
            guess = guess_between(bottom, top, not_below, above_top, top_k, turn)
            enough = _count_in_memory(own, begin, low, high, guess, high, SEG)
            bottom, top, not_below, above_top = narrow(bottom, top, not_below, above_top, guess, enough,
                                                        top_k, top_k)
            turn += 1
        start, end = low, high - 1
        if not_below > top_k:
            while start < end:
                half = start + (end - start) // 2
                enough = _count_in_memory(own, begin, low, high, bottom, half, SEG)
                end = tl.where(enough >= top_k, half, end)
                start = tl.where(enough >= top_k, start, half + 1)
        tl.store(found + 2 * row, bottom)
        tl.store(found + 2 * row + 1, end)


@kernel(do_not_specialize=_FIXED, do_not_specialize_on_alignment=_INTS)
def _write_kernel(
    first, stop, scores, found, chosen, scores_stride, chosen_stride, top_k,
    SEG: tl.constexpr,
):
    """Write the chosen positions of one token row in order."""
    row = tl.program_id(0).to(tl.int64)
    low = tl.load(first + row).to(tl.int32)
    high = tl.load(stop + row).to(tl.int32)
    to, own = chosen + row * chosen_stride, scores + row * scores_stride
    if high - low <= top_k:  # all of them
        for start in range(0, top_k, SEG):
            place = start + tl.arange(0, SEG)
            tl.store(to + place, tl.where(low + place < high, low + place, _NONE), mask=place < top_k)
    else:
        least, last = tl.load(found + 2 * row), tl.load(found + 2 * row + 1)
        before = 0
        for start in range(low, high, SEG):
            position = start + tl.arange(0, SEG)
            order = ordered(tl.load(own + position, mask=position < high, other=0.0))
            is_chosen = (position < high) & _is_chosen(position, order, least, last)
            written = before + tl.cumsum(is_chosen.to(tl.int32), axis=0)
            tl.store(to + written - 1, position, mask=is_chosen & (written <= top_k))
            before += tl.sum(is_chosen.to(tl.int32), axis=0)


def write_best(
    scores: torch.Tensor, contexts: TokenContexts, chosen: torch.Tensor, *, sizes: tuple[int, ...] = SIZES,
    segment: int = SEGMENT,
) -> None:
    """Write the top-k positions into chosen [tokens, top_k], as `kernels.latent.choose_positions` does, from scores
    [tokens, positions] float32. Scores are read only for contexts with more than top_k positions. Their rows must be
    padded to whole groups of positions."""
    num_tokens, top_k = chosen.shape
    num_keys, above = scores.shape[1], -1
    found = torch.empty(num_tokens, 2, dtype=torch.int32, device=scores.device)
    common = (contexts.first, contexts.stop, scores, found)
    limit: dict[str, int] = {} if knobs.runtime.interpret else {"maxnreg": MAX_REGISTERS}
    for size in sizes:
        if above < num_keys:
            warps = max(4, size // (32 * PER_THREAD))
            _search_kernel[(num_tokens,)](*common, scores.stride(0), top_k, above, SIZE=size, num_warps=warps, **limit)
        above = size
    if above < num_keys:
        _search_in_memory_kernel[(num_tokens,)](*common, scores.stride(0), top_k, above, SEG=segment, num_warps=16)
    _write_kernel[(num_tokens,)](*common, chosen, scores.stride(0), chosen.stride(0), top_k,
                                 SEG=min(segment, WRITTEN), num_warps=4)


def choose_positions(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, contexts: TokenContexts,
                     chosen: torch.Tensor, scales: torch.Tensor | None = None,
                     counters: torch.Tensor | None = None) -> None:
    """Write the top-k cached positions of each token row, those with the highest indexer scores, to `chosen`. Token
    rows are scored in batches so that the scores of a batch fit into MAX_SCORES numbers. See
    `kernels.latent.choose_positions` for the arguments."""
    num_tokens, num_keys, top_k = check_choice(q, weights, keys, contexts, chosen, scales)
    step = max(1, min(num_tokens, MAX_SCORES // num_keys))
    columns = triton.cdiv(num_keys, ALIGNED.value) * ALIGNED.value
    scores = torch.empty(step, columns, dtype=torch.float32, device=q.device)
    for begin in range(0, num_tokens, step):
        rows = slice(begin, min(begin + step, num_tokens))
        own = contexts.cut(rows)
        launch_scores(q[rows], weights[rows], keys, own, top_k, scores)
        write_best(scores, own, chosen[rows])
