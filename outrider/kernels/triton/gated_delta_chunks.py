"""The gated delta rule over a request's long run of known tokens, in chunks that matrix products handle at once.

`gated_delta.py` launches it, inside the programs that walk token by token. A chunk is a triangular system, because each
of its tokens corrects what the state and the tokens before it predict. Where a head decays as a whole, the decays
between tokens are one matrix; where each key channel decays by itself (KDA), they are part of the products of keys.
"""

from __future__ import annotations

import triton
import triton.language as tl
from outrider.kernels.triton.cache_write import zero_or_nan
from outrider.kernels.triton.gated_delta_parts import EPS, save_checkpoints
from outrider.kernels.triton.gated_delta_prepare import unit_triangular_inverse
from outrider.kernels.triton.recurrent_step import next_boundary

CHUNK = 16  # tokens that products handle at once; with 32 a thread's part of them does not fit into its registers
_LEAST = tl.constexpr(-1000.0)  # of a channel's logarithm in a chunk: its decay is 0, and products with 0 are not NaN


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
    of_k, of_q = tl.rsqrt(k_square + EPS), tl.rsqrt(q_square + EPS) * scale
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
    of_k, of_q = tl.rsqrt(k_square + EPS), tl.rsqrt(q_square + EPS) * scale
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
    inverse = unit_triangular_inverse(below, TOKENS, LEVELS, PRECISION)
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
def scan_known(state, request, part, saves, sizes, scale, KEY_DIM: tl.constexpr, PAGE_WORDS: tl.constexpr,
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
                save_checkpoints(state, request.begin + end, request, part, saves, KEY_DIM, PAGE_WORDS)
            begin = end
            most = tl.where(is_lost, TOKENS, most)
        else:
            most = 1
            tl.debug_barrier()  # outputs are stored again, by other threads
    return state
