"""The gated delta rule over a ragged batch: fold, known tokens, store, drafts, as one launch per layer. A head decays
as a whole, or each of its key channels by itself (KDA).

`kernels/recurrent.py` is the specification. A program has some value rows of one head of one request: it reads its part
of the state once and writes it once, and writes it to pages where a checkpoint's boundary is passed. Decoding takes the
time of reading and writing the states, as long as enough of them are on their way: programs are small, and load states
before the kernel that makes the inputs of the recurrence (convolved inputs, gates) has ended. The row's tail and window
are moved on here, since no other program reads them any more.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

import triton
import triton.language as tl
from outrider.kernels.recurrent import NORM_EPS, SHORT_RUN, CheckpointTargets
from outrider.kernels.triton.cache_write import zero_or_nan
from outrider.kernels.triton.common import (
    cdiv,
    next_power_of_two,
    pdl_options,
    release_dependents,
    require,
    uses_pdl,
    wait_for_inputs,
)
from outrider.kernels.triton.launch import kernel
from outrider.kernels.triton.recurrent_step import (
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
    save_state,
)
from triton import knobs

MAX_REGISTERS = 96  # of a walking thread: 21 programs fit a multiprocessor, and nothing spills
CHUNK = 16  # tokens that products handle at once; with 32 a thread's part of them does not fit into its registers
_EPS = tl.constexpr(NORM_EPS)
_SHORT_RUN = tl.constexpr(SHORT_RUN)
_LEAST = tl.constexpr(-1000.0)  # of a channel's logarithm in a chunk: its decay is 0, and products with 0 are not NaN


# What programs hand around


class _Sizes(NamedTuple):
    """Constants: kernels are compiled for a model's sizes."""

    conv_dim: tl.constexpr
    heads: tl.constexpr
    out_dim: tl.constexpr
    value_dim: tl.constexpr
    key_dim: tl.constexpr


class _Request(NamedTuple):
    """A request's places: 0 to pending - 1 are folded drafts, then come known tokens, then drafts."""

    index: tl.tensor
    folded: tl.tensor  # index of place 0 among the inputs of the recurrence
    fresh: tl.tensor  # of place `pending`, less pending
    token_row: tl.tensor  # the same among token rows
    pending: tl.tensor
    known_end: tl.tensor  # the first draft's place
    begin: tl.tensor  # tokens before place 0
    layer_word: tl.tensor  # of a checkpoint, where the layer's state begins
    num_pages: tl.tensor  # of a checkpoint


class _Part(NamedTuple):
    """Which value rows of which head a program has, with pointers to their inputs and outputs in row 0 of each."""

    head: tl.tensor
    first_row: tl.tensor  # of the layer's state, with k dim elements each
    num_rows: tl.tensor
    has_value: tl.tensor  # [tile]
    has_key: tl.tensor  # [k dim]
    element: tl.tensor  # [tile, k dim] of the state from the first row on
    has: tl.tensor  # [tile, k dim]
    first_q: tl.tensor
    first_k: tl.tensor
    q: tl.tensor  # [k dim]
    k: tl.tensor  # [k dim]
    v: tl.tensor  # [tile]
    first_g: tl.tensor
    g: tl.tensor  # the logarithm of the decay; [k dim] where each channel has its own
    beta: tl.tensor
    y: tl.tensor  # [tile]


@triton.jit
def _part_of(head, tile, convolved, g, beta, out, sizes, KEY_HEADS: tl.constexpr, TILE: tl.constexpr,
             KEYS: tl.constexpr, DECAYS: tl.constexpr):
    key, value = tl.arange(0, KEYS), tile * TILE + tl.arange(0, TILE)
    has_key, has_value = key < sizes.key_dim, value < sizes.value_dim
    first_q = convolved + head // (sizes.heads // KEY_HEADS) * sizes.key_dim
    first_k = first_q + KEY_HEADS * sizes.key_dim
    y = head * sizes.value_dim + value
    v = convolved + 2 * KEY_HEADS * sizes.key_dim + y
    # From the program's first row on: then a thread's addresses are one and constants.
    element = tl.arange(0, TILE)[:, None] * sizes.key_dim + key[None, :]
    has = has_value[:, None] & has_key[None, :]
    first_g = g + head * DECAYS
    if DECAYS > 1:
        of_g = first_g + key
    else:
        of_g = first_g
    first_row, num_rows = head * sizes.value_dim + tile * TILE, tl.minimum(TILE, sizes.value_dim - tile * TILE)
    return _Part(head, first_row, num_rows, has_value, has_key, element, has, first_q, first_k, first_q + key,
                 first_k + key, v, first_g, of_g, beta + head, out + y)


@triton.jit
def _save(state, seen, request, part, saves, KEY_DIM: tl.constexpr, PAGE_WORDS: tl.constexpr):
    """Writes the checkpoints, if any, whose boundary is where the walk stands."""
    save_state(state, seen, request.index, part.first_row, part.num_rows, saves, request.layer_word, request.num_pages,
               KEY_DIM, PAGE_WORDS)


@triton.jit
def _next_save(seen, request, saves):
    """The first boundary after `seen` tokens that the stored state reaches, or -1."""
    last = request.begin + request.known_end
    found = next_boundary(seen, last + 1, request.index, saves)
    return tl.where(found > last, -1, found)


# Token by token


@triton.jit
def _token_inputs(place, end, request, part, sizes, DECAYS: tl.constexpr):
    """Inputs as projections and convolution leave them; 0 from place `end` on."""
    is_there = place < end
    index = (place + tl.where(place < request.pending, request.folded, request.fresh)).to(tl.int64)
    row = index * sizes.conv_dim
    q = tl.load(part.q + row, mask=part.has_key & is_there, other=0.0)
    k = tl.load(part.k + row, mask=part.has_key & is_there, other=0.0)
    v = tl.load(part.v + row, mask=part.has_value & is_there, other=0.0)
    if DECAYS > 1:
        g = tl.load(part.g + index * (sizes.heads * DECAYS), mask=part.has_key & is_there, other=0.0)
    else:
        g = tl.load(part.g + index * sizes.heads, mask=is_there, other=0.0)
    beta = tl.load(part.beta + index * sizes.heads, mask=is_there, other=0.0)
    return q, k, v, g, beta


@triton.jit
def _walk(state, begin, end, next_save, cells, request, part, saves, sizes, scale, KEY_DIM: tl.constexpr,
          PAGE_WORDS: tl.constexpr, STORES: tl.constexpr, DECAYS: tl.constexpr):
    """Places begin to end - 1, one after the other, each loaded while the one before it is worked on. STORES: the state
    is stored where the known tokens end, if the walk passes there. next_save: the first boundary of a checkpoint; with
    PAGE_WORDS of 0 none is written."""
    q, k, v, g, beta = _token_inputs(begin, end, request, part, sizes, DECAYS)
    for place in range(begin, end):
        next_q, next_k, next_v, next_g, next_beta = _token_inputs(place + 1, end, request, part, sizes, DECAYS)
        q = q * (tl.rsqrt(tl.sum(q * q, axis=0) + _EPS) * scale)
        k = k * tl.rsqrt(tl.sum(k * k, axis=0) + _EPS)
        if DECAYS > 1:
            state = state * tl.exp(g)[None, :]
        else:
            state = state * tl.exp(g)
        error = (v - tl.sum(state * k[None, :], axis=1)) * beta
        state = state + error[:, None] * k[None, :]
        y = tl.sum(state * q[None, :], axis=1)
        at = part.y + (request.token_row + place).to(tl.int64) * sizes.out_dim
        tl.store(at, y.to(part.y.dtype.element_ty), mask=part.has_value & (place >= request.pending))
        if PAGE_WORDS > 0:
            if request.begin + place + 1 == next_save:
                _save(state, next_save, request, part, saves, KEY_DIM, PAGE_WORDS)
                next_save = _next_save(next_save, request, saves)
        if STORES:
            if place + 1 == request.known_end:
                tl.store(cells, state, mask=part.has, eviction_policy="evict_first")
        q, k, v, g, beta = next_q, next_k, next_v, next_g, next_beta
    return state


# In chunks


@triton.jit
def _unit_triangular_inverse(below, SIZE: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    """The inverse of I + below, which is 0 on the diagonal and above it. SIZE is 2 to the power of LEVELS.

    Squares on the diagonal are inverted in pairs, [[A, 0], [B, D]] to [[A', 0], [-D' B A', D']], from squares of one
    up: nothing greater is ever formed than inverses of parts of the matrix, unlike in a series of its powers."""
    row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    inverse = tl.where(row == column, 1.0, 0.0) - tl.where(row // 2 == column // 2, below, 0.0)
    for level in tl.static_range(1, LEVELS):
        square_row, square_column = row >> level, column >> level
        is_pair = (square_row % 2 == 1) & (square_row == square_column + 1)
        turned = tl.dot(inverse, tl.where(is_pair, below, 0.0), input_precision=PRECISION)
        inverse -= tl.dot(turned, inverse, input_precision=PRECISION)
    return inverse


@triton.jit
def _key_products(part, inputs, is_there, sizes, scale, TOKENS: tl.constexpr, PIECE: tl.constexpr,
                  PRECISION: tl.constexpr):
    """k k' and q k' [tokens, tokens] of normed q and k, and the factors [tokens, 1] that norm q and k. In pieces of the
    key: whole products would need more registers than a thread has."""
    kk, qk = tl.zeros([TOKENS, TOKENS], dtype=tl.float32), tl.zeros([TOKENS, TOKENS], dtype=tl.float32)
    k_square, q_square = tl.zeros([TOKENS], dtype=tl.float32), tl.zeros([TOKENS], dtype=tl.float32)
    for first in range(0, sizes.key_dim, PIECE):
        key = first + tl.arange(0, PIECE)[None, :]
        valid = is_there[:, None] & (key < sizes.key_dim)
        k = tl.load(part.first_k + inputs + key, mask=valid, other=0.0)
        q = tl.load(part.first_q + inputs + key, mask=valid, other=0.0)
        kk = tl.dot(k, tl.trans(k), kk, input_precision=PRECISION)
        qk = tl.dot(q, tl.trans(k), qk, input_precision=PRECISION)
        k_square += tl.sum(k * k, axis=1)
        q_square += tl.sum(q * q, axis=1)
    of_k, of_q = tl.rsqrt(k_square + _EPS), tl.rsqrt(q_square + _EPS) * scale
    kk = kk * of_k[:, None] * of_k[None, :]
    return kk, qk * of_q[:, None] * of_k[None, :], of_q[:, None], of_k[:, None]


@triton.jit
def _channel_logs(part, index, key, valid, sizes, DECAYS: tl.constexpr):
    """The logarithms [tokens, keys] of the decays of key channels `key` [1, keys]. 0 where no token is."""
    g = tl.load(part.first_g + (index * (sizes.heads * DECAYS))[:, None] + key, mask=valid, other=0.0)
    return tl.maximum(g, _LEAST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _channel_products(part, index, is_there, sizes, scale, DECAYS: tl.constexpr, TOKENS: tl.constexpr,
                      LEVELS: tl.constexpr, PIECE: tl.constexpr, PRECISION: tl.constexpr):
    """`_key_products` where every channel decays by itself between two tokens: k k' of a token and those before it, q
    k' with the token itself too, both decayed, else 0.

    A decay between two tokens has no two factors that hold for all pairs: their exponentials would overflow. So pairs
    are taken level by level, from neighbours up: the later one in the second half of a block of 2, 4, 8 .. tokens, the
    earlier one in its first half. What the middle leaves of the earlier token, and the later token of the middle, are
    both at most 1. Sums of the steps between are products with masks, see `_chunk`."""
    token = tl.arange(0, TOKENS)
    row, column = token[:, None], token[None, :]
    inputs = (index * sizes.conv_dim)[:, None]
    kk, qk = tl.zeros([TOKENS, TOKENS], dtype=tl.float32), tl.zeros([TOKENS, TOKENS], dtype=tl.float32)
    k_square, q_square = tl.zeros([TOKENS], dtype=tl.float32), tl.zeros([TOKENS], dtype=tl.float32)
    own = tl.zeros([TOKENS], dtype=tl.float32)  # q k of each token
    for first in range(0, sizes.key_dim, PIECE):
        key = first + tl.arange(0, PIECE)[None, :]
        valid = is_there[:, None] & (key < sizes.key_dim)
        k = tl.load(part.first_k + inputs + key, mask=valid, other=0.0)
        q = tl.load(part.first_q + inputs + key, mask=valid, other=0.0)
        g = _channel_logs(part, index, key, valid, sizes, DECAYS)
        for level in tl.static_range(LEVELS):
            half_row, half_column = row >> level, column >> level
            is_late = half_row % 2 == 1
            is_between = (half_row == half_column) & tl.where(is_late, column <= row, column > row)
            left = tl.exp(tl.dot(tl.where(is_between, 1.0, 0.0), g, input_precision=PRECISION))
            late_k, late_q = k * left, q * left
            is_pair = is_late & (half_row == half_column + 1)
            kk += tl.where(is_pair, tl.dot(late_k, tl.trans(late_k), input_precision=PRECISION), 0.0)
            qk += tl.where(is_pair, tl.dot(late_q, tl.trans(late_k), input_precision=PRECISION), 0.0)
        k_square += tl.sum(k * k, axis=1)
        q_square += tl.sum(q * q, axis=1)
        own += tl.sum(q * k, axis=1)
    of_k, of_q = tl.rsqrt(k_square + _EPS), tl.rsqrt(q_square + _EPS) * scale
    qk += tl.where(row == column, own[:, None], 0.0)
    kk = kk * of_k[:, None] * of_k[None, :]
    return kk, qk * of_q[:, None] * of_k[None, :], of_q[:, None], of_k[:, None]


@triton.jit
def _chunk(state, begin, end, must_finish, request, part, sizes, scale, DECAYS: tl.constexpr, TOKENS: tl.constexpr,
           LEVELS: tl.constexpr, PIECE: tl.constexpr, PRECISION: tl.constexpr):
    """Known tokens at places begin to end - 1, at most TOKENS. Every token corrects what the state and the tokens
    before it predict: a triangular system. Decays between tokens are sums of the steps between, not differences of sums
    from the start, which lose the small steps beside large ones. Where no token is, all inputs are 0.

    Returns (the new state, True), or (the old one, False) if a token is not finite: then the outputs before it are
    spoilt too, and the caller computes them again. must_finish: the new state in any case."""
    token = tl.arange(0, TOKENS)
    is_there = begin + token < end
    index = (request.fresh + begin + token).to(tl.int64)
    inputs = (index * sizes.conv_dim)[:, None]
    has_key = is_there[:, None] & part.has_key[None, :]
    has_value = is_there[:, None] & part.has_value[None, :]
    beta = tl.load(part.beta + index * sizes.heads, mask=is_there, other=0.0)[:, None]
    row, column = token[:, None], token[None, :]
    if DECAYS > 1:
        kk, qk, of_q, of_k = _channel_products(part, index, is_there, sizes, scale, DECAYS, TOKENS, LEVELS, PIECE,
                                               PRECISION)
        g = _channel_logs(part, index, tl.arange(0, part.q.shape[0])[None, :], has_key, sizes, DECAYS)
        since_start = tl.exp(tl.cumsum(g, axis=0))
    else:
        kk, qk, of_q, of_k = _key_products(part, inputs, is_there, sizes, scale, TOKENS, PIECE, PRECISION)
        g = tl.load(part.g + index * sizes.heads, mask=is_there, other=0.0)
        between = tl.exp(tl.cumsum(tl.where(row > column, g[:, None], 0.0), axis=0))
        since_start = tl.exp(tl.cumsum(g, axis=0))[:, None]
        kk, qk = kk * between, qk * between
    below = tl.where(row > column, kk * beta, 0.0)
    inverse = _unit_triangular_inverse(below, TOKENS, LEVELS, PRECISION)
    k = tl.load(part.k[None, :] + inputs, mask=has_key, other=0.0) * of_k
    v = tl.load(part.v[None, :] + inputs, mask=has_value, other=0.0)
    q = tl.load(part.q[None, :] + inputs, mask=has_key, other=0.0) * of_q
    if DECAYS > 1:
        errors = (v - tl.dot(k * since_start, tl.trans(state), input_precision=PRECISION)) * beta
        y = tl.dot(q * since_start, tl.trans(state), input_precision=PRECISION)
    else:
        errors = (v - since_start * tl.dot(k, tl.trans(state), input_precision=PRECISION)) * beta
        y = since_start * tl.dot(q, tl.trans(state), input_precision=PRECISION)
    corrections = tl.dot(inverse, errors, input_precision=PRECISION)
    y = tl.dot(tl.where(row >= column, qk, 0.0), corrections, y, input_precision=PRECISION)
    at = part.y[None, :] + ((request.token_row + begin + token).to(tl.int64) * sizes.out_dim)[:, None]
    tl.store(at, y.to(part.y.dtype.element_ty), mask=has_value)
    is_finite = tl.sum(zero_or_nan(corrections)) == 0.0
    if is_finite | must_finish:
        if DECAYS > 1:
            to_end = tl.exp(tl.dot(tl.where(column > row, 1.0, 0.0), g, input_precision=PRECISION))
            state = state * tl.exp(tl.sum(g, axis=0))[None, :]
        else:
            to_end = tl.sum(tl.where(row == TOKENS - 1, between, 0.0), axis=0)[:, None]
            state = state * tl.exp(tl.sum(g, axis=0))
        state = tl.dot(tl.trans(corrections), k * to_end, state, input_precision=PRECISION)
    return state, is_finite


@triton.jit
def _scan(state, request, part, saves, sizes, scale, KEY_DIM: tl.constexpr, PAGE_WORDS: tl.constexpr,
          DECAYS: tl.constexpr, TOKENS: tl.constexpr, LEVELS: tl.constexpr, PIECE: tl.constexpr,
          PRECISION: tl.constexpr):
    """All known tokens, in chunks that end at boundaries. A chunk with a token that is not finite is computed again
    token by token; behind that token everything is lost, and chunks are whole again."""
    begin, most, is_lost = request.pending, TOKENS, False
    while begin < request.known_end:
        end = tl.minimum(begin + most, request.known_end)
        if PAGE_WORDS > 0:
            seen = request.begin
            end = next_boundary(seen + begin, seen + end, request.index, saves) - seen
        must_finish = is_lost | (most == 1)
        state, is_finite = _chunk(state, begin, end, must_finish, request, part, sizes, scale, DECAYS, TOKENS, LEVELS,
                                  PIECE, PRECISION)
        is_lost = is_lost | ((most == 1) & (not is_finite))
        if is_finite | must_finish:
            if PAGE_WORDS > 0:
                _save(state, request.begin + end, request, part, saves, KEY_DIM, PAGE_WORDS)
            begin = end
            most = tl.where(is_lost, TOKENS, most)
        else:
            most = 1
            tl.debug_barrier()  # outputs are stored again, by other threads
    return state


# The launch


@kernel(do_not_specialize=["requests", "tokens", "layer_word"])
def _delta_kernel(
    counts, requests, tokens, convolved, g, beta, conv_in, conv_stride, gates, gate_strides, states, tail, window,
    gate_windows, out, saves, layer_word, num_pages, scale,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_DIM: tl.constexpr, TILE: tl.constexpr,
    KEYS: tl.constexpr, TILES: tl.constexpr, TOKENS: tl.constexpr, LEVELS: tl.constexpr, PIECE: tl.constexpr,
    CHUNKED: tl.constexpr, DECAYS: tl.constexpr, PRECISION: tl.constexpr, PAGE_WORDS: tl.constexpr,
    FOLD_ONLY: tl.constexpr, CONV_DIM: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, PARTS: tl.constexpr,
    CHANNELS: tl.constexpr, TAIL: tl.constexpr, DRAFTS: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):
    """EARLY: of what this kernel reads, the kernels that may still run make convolved, g and beta alone. All else, the
    state above all, is loaded before it waits for them."""
    release_dependents(PDL)
    if not EARLY:
        wait_for_inputs(PDL)
    tile, head, index = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, start, stop, computed, known, drafts, pending = load_counts(counts, index, requests)
    last_stop = load_last_stop(counts, requests)
    sizes = _Sizes(CONV_DIM, HEADS, HEADS * VALUE_DIM, VALUE_DIM, KEY_DIM)
    part = _part_of(head, tile, convolved, g, beta, out, sizes, KEY_HEADS, TILE, KEYS, DECAYS)
    live = tl.where(known > 0, known + drafts, 0)
    request = _Request(index, index * WINDOW, requests * WINDOW + start - pending, start - pending, pending,
                       pending + known, computed - pending, layer_word, num_pages)
    is_walked = (known > 0) | FOLD_ONLY
    cells = states + (row * (HEADS * VALUE_DIM) + part.first_row) * KEY_DIM + part.element
    # The next step reads the state again, after the states and weights of all other layers: caches cannot keep it.
    state = tl.load(cells, mask=part.has & is_walked, other=0.0, eviction_policy="evict_first")
    kept_tail = load_tail(head * TILES + tile, row, start, known, pending, is_walked, conv_in, conv_stride, tail,
                          window, CONV_DIM, WIDTH, WINDOW, PARTS, CHANNELS, TAIL)
    next_save = -1
    if PAGE_WORDS > 0:
        next_save = _next_save(request.begin, request, saves)
    if EARLY:
        wait_for_inputs(PDL)
    column = head * VALUE_DIM + tile * TILE + tl.arange(0, TILE)
    clear_dead(out, HEADS * VALUE_DIM, column, part.has_value, index, requests, live, start, stop, last_stop, tokens)
    if is_walked:
        is_long = CHUNKED & (known > _SHORT_RUN)
        end = tl.where(is_long, pending, pending + live)
        state = _walk(state, 0, end, next_save, cells, request, part, saves, sizes, scale, KEY_DIM, PAGE_WORDS,
                      not FOLD_ONLY, DECAYS)
        if CHUNKED:
            if is_long:
                state = _scan(state, request, part, saves, sizes, scale, KEY_DIM, PAGE_WORDS, DECAYS, TOKENS,
                              LEVELS, PIECE, PRECISION)
                tl.store(cells, state, mask=part.has)
                _walk(state, request.known_end, pending + live, -1, cells, request, part, saves, sizes, scale,
                      KEY_DIM, 0, False, DECAYS)
        if not FOLD_ONLY:
            keep_inputs(
                kept_tail, head * TILES + tile, row, start, known, drafts, conv_in, conv_stride, gates, gate_strides,
                tail, window, gate_windows, CONV_DIM, WIDTH, WINDOW, HEADS, HEADS * DECAYS, 2, PARTS, CHANNELS, TAIL,
                DRAFTS,
            )


def delta_config(value_dim: int, chunked: bool) -> StepConfig:
    """A program that walks is one warp with few value rows: no warp waits for another to norm a key or to store, and a
    multiprocessor has room for many programs, whose states are on their way at the same time. A warp has whole rows, so
    that the bits of a walk do not depend on the tile. Products need more rows, and warps that share them."""
    return StepConfig(min(32, next_power_of_two(value_dim)), 4) if chunked else StepConfig(
        min(8, next_power_of_two(value_dim)), 1)


def delta_steps(
    step: StepTensors, inputs: StepInputs, layer: LayerTensors, *, num_key_heads: int,
    targets: CheckpointTargets | None = None, chunked: bool = False, fold_only: bool = False,
    config: StepConfig | None = None, chunk: int = CHUNK, precision: str = "tf32x3", per_channel: bool = False,
    follows_inputs: bool = False,
) -> torch.Tensor:
    """Moves the rows of a batch on by one step and returns y [tokens, value heads * v dim] in the inputs' dtype, 0 for
    dead and padded token rows. inputs.wide_gates: g (the logarithm of the decay) and beta; neighbouring value heads
    share a key head. per_channel: g has a number for each key channel of a head, not one for the head. chunked:
    requests with more than SHORT_RUN known tokens go in chunks of `chunk`, a power of two. fold_only: rows that ended;
    writes nothing but checkpoints. follows_inputs: the launches before this one are `recurrent_inputs` and perhaps
    `save_tails`, so that states can be loaded while these run."""
    name = "delta_steps"
    num_heads, _, num_channels = layer.state.shape[1:]
    decays = num_channels if per_channel else 1
    sizes = check_step(name, step, inputs, layer, targets, gate_sizes=(num_heads * decays, num_heads))
    heads, value_dim, key_dim, device = sizes.heads, sizes.dim, sizes.n, layer.state.device
    ok = num_key_heads > 0 and heads % num_key_heads == 0
    require(ok, name, "num_key_heads", f"is {num_key_heads} for {heads} value heads")
    ok = sizes.conv_dim == 2 * num_key_heads * key_dim + heads * value_dim
    require(ok, name, "inputs.conv_in", f"has {sizes.conv_dim} channels, not those of q, k and v")
    require(chunk >= 16 and chunk & (chunk - 1) == 0, name, "chunk", f"is {chunk}, not a power of two from 16 on")
    out = torch.empty(sizes.tokens, heads * value_dim, dtype=inputs.conv_in.dtype, device=device)
    if sizes.requests == 0:
        return out.zero_()
    tile, num_warps = config or delta_config(value_dim, chunked)
    keys = next_power_of_two(key_dim)
    if chunked:  # products have least sizes
        tile, keys = max(16, tile), max(16, keys)
    num_tiles = cdiv(value_dim, tile)
    saves, layer_word, num_pages, page_words = save_args(targets, step, layer)
    pdl, is_limited = uses_pdl(device), num_warps == 1 and tile <= 8 and not knobs.runtime.interpret
    limit = {"maxnreg": MAX_REGISTERS} if is_limited else {}
    _delta_kernel[(num_tiles, heads, sizes.requests)](
        step.counts, sizes.requests, sizes.tokens, inputs.convolved, *inputs.wide_gates, inputs.conv_in,
        inputs.conv_in.stride(0), inputs.gates, tuple(gate.stride(0) for gate in inputs.gates), layer.state, layer.tail,
        layer.conv_in, layer.gates, out, saves, layer_word, num_pages, key_dim**-0.5,
        HEADS=heads, KEY_HEADS=num_key_heads, VALUE_DIM=value_dim, KEY_DIM=key_dim, TILE=tile, KEYS=keys,
        TILES=num_tiles, TOKENS=chunk, LEVELS=chunk.bit_length() - 1, PIECE=min(32, keys), CHUNKED=chunked,
        DECAYS=decays, PRECISION=precision, PAGE_WORDS=page_words, FOLD_ONLY=fold_only,
        **keep_sizes(sizes, heads * num_tiles), EARLY=follows_inputs, PDL=pdl, num_warps=num_warps, **limit,
        **pdl_options(pdl),
    )
    return out
