"""Computes the part of the gated delta rule's chunks that does not need the state, for all chunks of a batch in one
launch. A second launch then advances the states through the chunks (`scan.py`).

A chunk is a triangular system of equations, because each of its tokens corrects what the state and the tokens before it
predict. It is solved here for both right-hand sides, values and keys. If a head decays as a whole, the decays between
tokens are one matrix; if each key channel decays by itself (KDA), they are part of the products of keys. A decay is
always the product of the steps between two tokens, never a quotient of products from the start, which would overflow.

A token that is not finite must spoil its own result and later ones, but none before it, although products over a chunk
multiply it by 0 and 0 x NaN is NaN. So the chunk is computed as if it ended before that token; from there on its
queries are set to NaN, and so is the state after the chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from outrider.kernels.gpu.common import (
    next_power_of_two,
    padded_requests,
    pdl_options,
    release_dependents,
    wait_for_inputs,
)
from outrider.kernels.gpu.gated_delta.parts import EPS
from outrider.kernels.gpu.launch.triton_kernel import kernel
from outrider.kernels.gpu.pages.cache_write import zero_or_nan
from outrider.kernels.gpu.recurrent.step_tensors import StepInputs, StepSizes, load_counts
from outrider.kernels.recurrent import SHORT_RUN

_SHORT_RUN = tl.constexpr(SHORT_RUN)
_BLOCK = tl.constexpr(16)  # tokens whose products are taken pair by pair, where channels decay by themselves


class PrepareConfig(NamedTuple):
    """Launch options of the preparing kernel. Each program has one chunk of one head."""

    piece: int  # channels of keys or values at a time; whole ones would not fit into registers
    num_warps: int  # few: warps wait for each other at every product


class ChunkRecord(NamedTuple):
    """Pointers into the float32 record that `_prepare_kernel` writes for one chunk of a value head. Entries without a
    token are 0."""

    solved_keys: tl.tensor  # [chunk, keys] the system's solution for what the state predicts, negated
    queries: tl.tensor  # [chunk, keys] as they meet the state that the chunk begins with
    added: tl.tensor  # [chunk, keys] keys as they are left at the chunk's end
    solved_values: tl.tensor  # [chunk, values] the system's solution for the values
    scores: tl.tensor  # [chunk, chunk] q k' of a token, itself and those before it
    kept: tl.tensor  # [keys] what the chunk leaves of the state
    num_finite: tl.tensor  # tokens before the first one that is not finite; `chunk` if all are


@triton.constexpr_function
def record_size(tokens: int, keys: int, values: int) -> int:
    """Return the number of floats in a record: a multiple of 16, so that loads are wide."""
    return tokens * (3 * keys + values + tokens) + keys + 16


@triton.jit
def record_of(chunks, slot, head, heads, TOKENS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr):
    solved_keys = chunks + (slot * heads + head).to(tl.int64) * record_size(TOKENS, KEYS, VALUES)
    queries = solved_keys + TOKENS * KEYS
    added = queries + TOKENS * KEYS
    solved_values = added + TOKENS * KEYS
    scores = solved_values + TOKENS * VALUES
    kept = scores + TOKENS * TOKENS
    return ChunkRecord(solved_keys, queries, added, solved_values, scores, kept, kept + KEYS)


@triton.jit
def first_slot(start, request, TOKENS: tl.constexpr):
    """Return the index of the record for the first chunk of a request, whose first token row is `start`. The records of
    its other chunks follow. Chunks are counted from the first known token. A request with n token rows has at most
    cdiv(n, TOKENS) chunks, which end before the next request's first record; all indices are below tokens // TOKENS +
    requests."""
    return start // TOKENS + request


@triton.jit
def _find_chunk(counts, slot, requests, TOKENS: tl.constexpr, PAD: tl.constexpr):
    """Return (request, index of the chunk in the request) for the record with index `slot`. The request may have fewer
    chunks than that."""
    index = tl.arange(0, PAD)
    start = tl.load(counts + requests + index, mask=index < requests, other=0).to(tl.int32)
    first = first_slot(start, index, TOKENS)
    is_before = (index < requests) & (first <= slot)
    return tl.sum(is_before.to(tl.int32), axis=0) - 1, slot - tl.max(tl.where(is_before, first, 0), axis=0)


class ChunkTokens(NamedTuple):
    """The tokens of a chunk [tokens], with pointers to the head's inputs of token row 0."""

    token: tl.tensor
    is_there: tl.tensor
    count: tl.tensor
    index: tl.tensor  # among the inputs of the recurrence
    q: tl.tensor
    k: tl.tensor
    v: tl.tensor
    g: tl.tensor
    beta: tl.tensor  # [tokens], loaded
    conv_dim: tl.tensor
    g_size: tl.tensor  # numbers of g of a token


@triton.jit
def unit_triangular_inverse(below, SIZE: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    """Return the inverse of I + below, where `below` is 0 on and above the diagonal. SIZE is 2 to the power of LEVELS.

    Blocks on the diagonal are inverted in pairs, from blocks of size 1 up: [[A, 0], [B, D]] becomes [[A', 0], [-D' B
    A', D']]. No number is larger than in the inverses of parts of the matrix, unlike in a series of the matrix's
    powers.
    """
    row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    inverse = tl.where(row == column, 1.0, 0.0) - tl.where(row // 2 == column // 2, below, 0.0)
    for level in tl.static_range(1, LEVELS):
        square_row, square_column = row >> level, column >> level
        is_pair = (square_row % 2 == 1) & (square_row == square_column + 1)
        turned = tl.dot(inverse, tl.where(is_pair, below, 0.0), input_precision=PRECISION)
        inverse -= tl.dot(turned, inverse, input_precision=PRECISION)
    return inverse


@triton.jit
def _load_keys(tokens, key, KEY_DIM: tl.constexpr):
    """Load q and k [tokens, keys], as the convolution made them."""
    valid = tokens.is_there[:, None] & (key < KEY_DIM)[None, :]
    row = (tokens.index * tokens.conv_dim)[:, None] + key[None, :]
    return tl.load(tokens.q + row, mask=valid, other=0.0), tl.load(tokens.k + row, mask=valid, other=0.0)


@triton.jit
def _load_values(tokens, value, VALUE_DIM: tl.constexpr):
    valid = tokens.is_there[:, None] & (value < VALUE_DIM)[None, :]
    return tl.load(tokens.v + (tokens.index * tokens.conv_dim)[:, None] + value[None, :], mask=valid, other=0.0)


@triton.jit
def load_decays(g, index, valid, key, g_size, KEY_DIM: tl.constexpr, DECAYS: tl.constexpr):
    """Load decays [tokens, keys], or [tokens, 1] if a head decays as a whole; 1 where there is no token. g: pointer to
    the head's decays; g_size: how many decays a token has over all heads."""
    if DECAYS > 1:
        at = g + (index * g_size)[:, None] + key[None, :]
        return tl.exp(tl.load(at, mask=valid[:, None] & (key < KEY_DIM)[None, :], other=0.0))
    else:
        return tl.exp(tl.load(g + index * g_size, mask=valid, other=0.0))[:, None]


@triton.jit
def decays_around(g, index, is_there, has_next, key, g_size, KEY_DIM: tl.constexpr, DECAYS: tl.constexpr):
    """Return the decays from before the first token to each token, and from each token to the last: [tokens, keys], or
    [tokens, 1] if a head decays as a whole. has_next: whether there is a token after each."""
    if DECAYS > 1:
        decays = load_decays(g, index, is_there, key, g_size, KEY_DIM, DECAYS)
        next_decays = load_decays(g, index + 1, has_next, key, g_size, KEY_DIM, DECAYS)
        return tl.cumprod(decays, axis=0), tl.cumprod(next_decays, axis=0, reverse=True)
    else:  # the compiler does not scan columns of one
        decays = tl.exp(tl.load(g + index * g_size, mask=is_there, other=0.0))
        next_decays = tl.exp(tl.load(g + (index + 1) * g_size, mask=has_next, other=0.0))
        return tl.cumprod(decays, axis=0)[:, None], tl.cumprod(next_decays, axis=0, reverse=True)[:, None]


@triton.jit
def _products_of_blocks(q, k, tokens, key, KEY_DIM: tl.constexpr, TOKENS: tl.constexpr, PIECE: tl.constexpr):
    """Return the decayed products k k' and q k' [blocks, _BLOCK, _BLOCK] of tokens in the same block, summed over some
    key channels. The products of each token with later tokens are computed from the block's last token back. The result
    also holds products of pairs in the wrong order, which are not masked here."""
    blocks: tl.constexpr = TOKENS // _BLOCK
    q, k = tl.reshape(q, [blocks, _BLOCK, PIECE]), tl.reshape(k, [blocks, _BLOCK, PIECE])
    place = tl.arange(0, _BLOCK)
    kk = tl.zeros([blocks, _BLOCK, _BLOCK], dtype=tl.float32)
    qk = tl.zeros([blocks, _BLOCK, _BLOCK], dtype=tl.float32)
    between = tl.full([blocks, _BLOCK, PIECE], 1.0, dtype=tl.float32)  # the token and each one behind it
    first = tl.arange(0, blocks) * _BLOCK
    # Of token 0 of the chunk; scalars from here on, so that every thread can compute any token's address.
    begin = tl.min(tokens.index, axis=0)
    for back in range(_BLOCK):
        earlier = first + (_BLOCK - 1 - back)
        valid = (earlier < tokens.count)[:, None] & (key < KEY_DIM)[None, :]
        earlier_k = tl.load(tokens.k + ((begin + earlier) * tokens.conv_dim)[:, None] + key[None, :], mask=valid,
                            other=0.0)
        decay = load_decays(tokens.g, begin + earlier, earlier < tokens.count, key, tokens.g_size, KEY_DIM, 2)
        left = between * earlier_k[:, None, :]
        is_column = place[None, None, :] == _BLOCK - 1 - back
        kk = tl.where(is_column, tl.sum(k * left, axis=2)[:, :, None], kk)
        qk = tl.where(is_column, tl.sum(q * left, axis=2)[:, :, None], qk)
        is_later = place[None, :, None] >= _BLOCK - 1 - back
        between = tl.where(is_later, between * decay[:, None, :], between)
    return kk, qk


@triton.jit
def _spread_blocks(blocks, TOKENS: tl.constexpr):
    """Expand [blocks, _BLOCK, _BLOCK] to [tokens, tokens] by repeating each block in every block of columns."""
    count: tl.constexpr = TOKENS // _BLOCK
    return tl.reshape(tl.broadcast_to(blocks[:, :, None, :], [count, _BLOCK, count, _BLOCK]), [TOKENS, TOKENS])


@triton.jit
def _decays_to_middle(tokens, key, level: tl.constexpr, KEY_DIM: tl.constexpr, TOKENS: tl.constexpr,
                      PIECE: tl.constexpr):
    """Return decays [tokens, keys] within blocks of 2 x 2^level tokens: from the middle of the block to a token of its
    second half, or from a token of its first half to the middle."""
    size: tl.constexpr = 1 << level
    halves: tl.constexpr = TOKENS // size
    decays = load_decays(tokens.g, tokens.index, tokens.is_there, key, tokens.g_size, KEY_DIM, 2)
    has_next = ((tokens.token + 1) % size != 0) & (tokens.token + 1 < tokens.count)
    next_decays = load_decays(tokens.g, tokens.index + 1, has_next, key, tokens.g_size, KEY_DIM, 2)
    since = tl.cumprod(tl.reshape(decays, [halves, size, PIECE]), axis=1)
    until = tl.cumprod(tl.reshape(next_decays, [halves, size, PIECE]), axis=1, reverse=True)
    is_late = (tl.arange(0, halves) % 2 == 1)[:, None, None]
    return tl.reshape(tl.where(is_late, since, until), [TOKENS, PIECE])


@triton.jit
def _channel_products(tokens, KEY_DIM: tl.constexpr, TOKENS: tl.constexpr, LEVELS: tl.constexpr, PIECE: tl.constexpr,
                      PRECISION: tl.constexpr):
    """Compute `_key_products` for key channels that decay separately: k k' and q k' with the decays between two tokens.
    Only entries of a token with itself or with earlier tokens are valid.

    The decay between two tokens cannot be split into one factor per token for all pairs, because quotients would
    overflow. Within blocks of _BLOCK tokens every pair has its own decay. Pairs across blocks are computed level by
    level with matrix products: the later token is in the second half of a block of 32, 64, ... tokens, the earlier one
    in its first half. The decays from the earlier token to the middle, and from the middle to the later token, are both
    at most 1.
    """
    row, column = tokens.token[:, None], tokens.token[None, :]
    blocks: tl.constexpr = TOKENS // _BLOCK
    block_kk = tl.zeros([blocks, _BLOCK, _BLOCK], dtype=tl.float32)
    block_qk = tl.zeros([blocks, _BLOCK, _BLOCK], dtype=tl.float32)
    kk, qk = tl.zeros([TOKENS, TOKENS], dtype=tl.float32), tl.zeros([TOKENS, TOKENS], dtype=tl.float32)
    k_square, q_square = tl.zeros([TOKENS], dtype=tl.float32), tl.zeros([TOKENS], dtype=tl.float32)
    for first in range(0, KEY_DIM, PIECE):
        key = first + tl.arange(0, PIECE)
        q, k = _load_keys(tokens, key, KEY_DIM)
        k_square += tl.sum(k * k, axis=1)
        q_square += tl.sum(q * q, axis=1)
        more_kk, more_qk = _products_of_blocks(q, k, tokens, key, KEY_DIM, TOKENS, PIECE)
        block_kk += more_kk
        block_qk += more_qk
        for level in tl.static_range(4, LEVELS):
            left = _decays_to_middle(tokens, key, level, KEY_DIM, TOKENS, PIECE)
            half_row, half_column = row >> level, column >> level
            is_pair = (half_row % 2 == 1) & (half_row == half_column + 1)
            turned = tl.trans(k * left)
            kk += tl.where(is_pair, tl.dot(k * left, turned, input_precision=PRECISION), 0.0)
            qk += tl.where(is_pair, tl.dot(q * left, turned, input_precision=PRECISION), 0.0)
    is_block = row // _BLOCK == column // _BLOCK
    kk = tl.where(is_block, _spread_blocks(block_kk, TOKENS), kk)
    qk = tl.where(is_block, _spread_blocks(block_qk, TOKENS), qk)
    return kk, qk, q_square, k_square


@triton.jit
def _key_products(tokens, KEY_DIM: tl.constexpr, TOKENS: tl.constexpr, PIECE: tl.constexpr, PRECISION: tl.constexpr):
    """Return k k' and q k' [tokens, tokens], and the squared lengths of q and k [tokens]. They are summed over pieces
    of the key, because whole products would need more registers than a thread has."""
    kk, qk = tl.zeros([TOKENS, TOKENS], dtype=tl.float32), tl.zeros([TOKENS, TOKENS], dtype=tl.float32)
    k_square, q_square = tl.zeros([TOKENS], dtype=tl.float32), tl.zeros([TOKENS], dtype=tl.float32)
    for first in range(0, KEY_DIM, PIECE):
        q, k = _load_keys(tokens, first + tl.arange(0, PIECE), KEY_DIM)
        kk = tl.dot(k, tl.trans(k), kk, input_precision=PRECISION)
        qk = tl.dot(q, tl.trans(k), qk, input_precision=PRECISION)
        k_square += tl.sum(k * k, axis=1)
        q_square += tl.sum(q * q, axis=1)
    row, column = tokens.token[:, None], tokens.token[None, :]
    g = tl.load(tokens.g + tokens.index * tokens.g_size, mask=tokens.is_there, other=0.0)
    between = tl.exp(tl.cumsum(tl.where(row > column, g[:, None], 0.0), axis=0))
    return kk * between, qk * between, q_square, k_square


@triton.jit
def _num_finite(tokens, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
                DECAYS: tl.constexpr, TOKENS: tl.constexpr, PIECE: tl.constexpr):
    """Return how many tokens come before the first token with a non-finite input to the state; TOKENS if there is
    none."""
    spoilt = zero_or_nan(tokens.beta)
    for first in range(0, KEYS, PIECE):
        key = first + tl.arange(0, PIECE)
        _, k = _load_keys(tokens, key, KEY_DIM)
        decays = load_decays(tokens.g, tokens.index, tokens.is_there, key, tokens.g_size, KEY_DIM, DECAYS)
        spoilt += tl.sum(zero_or_nan(k) + zero_or_nan(decays), axis=1)
    for first in range(0, VALUES, PIECE):
        spoilt += tl.sum(zero_or_nan(_load_values(tokens, first + tl.arange(0, PIECE), VALUE_DIM)), axis=1)
    return tl.min(tl.where(spoilt == 0.0, TOKENS, tokens.token), axis=0)


@triton.jit
def _prepare_chunk(record, tokens, num_finite, scale, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
                   KEYS: tl.constexpr, VALUES: tl.constexpr, DECAYS: tl.constexpr, TOKENS: tl.constexpr,
                   LEVELS: tl.constexpr, PIECE: tl.constexpr, PRECISION: tl.constexpr):
    """Compute and store the record of one head's chunk. tokens: those before num_finite."""
    row, column = tokens.token[:, None], tokens.token[None, :]
    if DECAYS > 1:
        kk, qk, q_square, k_square = _channel_products(tokens, KEY_DIM, TOKENS, LEVELS, PIECE, PRECISION)
    else:
        kk, qk, q_square, k_square = _key_products(tokens, KEY_DIM, TOKENS, PIECE, PRECISION)
    of_k, of_q = tl.rsqrt(k_square + EPS), tl.rsqrt(q_square + EPS) * scale
    scores = tl.where(row >= column, qk * of_q[:, None] * of_k[None, :], 0.0)
    tl.store(record.scores + row * TOKENS + column, scores)
    beta = tokens.beta[:, None]
    below = tl.where(row > column, kk * of_k[:, None] * of_k[None, :] * beta, 0.0)
    inverse = unit_triangular_inverse(below, TOKENS, LEVELS, PRECISION)
    has_next = tokens.token + 1 < tokens.count
    for first in range(0, KEYS, PIECE):
        key = first + tl.arange(0, PIECE)
        q, k = _load_keys(tokens, key, KEY_DIM)
        since_start, to_end = decays_around(tokens.g, tokens.index, tokens.is_there, has_next, key, tokens.g_size,
                                            KEY_DIM, DECAYS)
        k = k * of_k[:, None]
        at = row * KEYS + key[None, :]
        tl.store(record.solved_keys + at, -tl.dot(inverse, k * since_start * beta, input_precision=PRECISION))
        q = tl.where(row < num_finite, q * of_q[:, None] * since_start, float("nan"))
        tl.store(record.queries + at, q)
        tl.store(record.added + at, k * to_end)
        kept = tl.sum(tl.where(row == TOKENS - 1, since_start, 0.0), axis=0)
        kept = tl.where(num_finite < TOKENS, float("nan"), kept)
        tl.store(record.kept + key, tl.broadcast_to(kept, [PIECE]))
    for first in range(0, VALUES, PIECE):
        value = first + tl.arange(0, PIECE)
        v = _load_values(tokens, value, VALUE_DIM)
        at = record.solved_values + row * VALUES + value[None, :]
        tl.store(at, tl.dot(inverse, v * beta, input_precision=PRECISION), mask=(value < VALUES)[None, :])
    tl.store(record.num_finite, num_finite.to(tl.float32))


@kernel(do_not_specialize=["requests"])
def _prepare_kernel(
    counts, requests, convolved, g, beta, chunks, scale,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_DIM: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, DECAYS: tl.constexpr, TOKENS: tl.constexpr, LEVELS: tl.constexpr, PIECE: tl.constexpr,
    PAD: tl.constexpr, WINDOW: tl.constexpr, CONV_DIM: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):
    # In this order, the kernel after this one starts when all before this one have ended: it loads states early.
    wait_for_inputs(PDL)
    release_dependents(PDL)
    slot, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    request, chunk = _find_chunk(counts, slot, requests, TOKENS, PAD)
    row, start, stop, computed, known, drafts, pending = load_counts(counts, request, requests)
    if (known > _SHORT_RUN) & (chunk * TOKENS < known):
        token = tl.arange(0, TOKENS)
        count = tl.minimum(known - chunk * TOKENS, TOKENS)
        index = (requests * WINDOW + start + chunk * TOKENS + token).to(tl.int64)
        q = convolved + head // (HEADS // KEY_HEADS) * KEY_DIM
        k = q + KEY_HEADS * KEY_DIM
        v = convolved + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM
        of_head = g + head * DECAYS
        at_beta = beta + index * HEADS + head
        tokens = ChunkTokens(token, token < count, count, index, q, k, v, of_head,
                             tl.load(at_beta, mask=token < count, other=0.0), CONV_DIM, HEADS * DECAYS)
        num_finite = _num_finite(tokens, KEY_DIM, VALUE_DIM, KEYS, VALUES, DECAYS, TOKENS, PIECE)
        count = tl.minimum(count, num_finite)
        tokens = ChunkTokens(token, token < count, count, index, q, k, v, of_head,
                             tl.load(at_beta, mask=token < count, other=0.0), CONV_DIM, HEADS * DECAYS)
        record = record_of(chunks, slot, head, HEADS, TOKENS, KEYS, VALUES)
        _prepare_chunk(record, tokens, num_finite, scale, KEY_DIM, VALUE_DIM, KEYS, VALUES, DECAYS, TOKENS, LEVELS,
                       PIECE, PRECISION)


def prepare_chunks(
    counts: torch.Tensor, inputs: StepInputs, sizes: StepSizes, *, num_key_heads: int, decays: int, chunk: int,
    keys: int, values: int, config: PrepareConfig, precision: str, pdl: bool,
) -> torch.Tensor:
    """Compute the records [chunks, heads, record size] of all requests with more than SHORT_RUN known tokens; `scan.py`
    reads them. `delta_steps` has checked the arguments. keys, values: sizes of a head, padded."""
    slots, heads, device = sizes.tokens // chunk + sizes.requests, sizes.heads, counts.device
    chunks = torch.empty(slots, heads, record_size(chunk, keys, values), dtype=torch.float32, device=device)
    piece = max(16, min(config.piece, keys, next_power_of_two(values)))
    _prepare_kernel[(slots * heads,)](
        counts, sizes.requests, inputs.convolved, *inputs.wide_gates, chunks, sizes.n**-0.5,
        HEADS=heads, KEY_HEADS=num_key_heads, VALUE_DIM=sizes.dim, KEY_DIM=sizes.n, KEYS=keys, VALUES=values,
        DECAYS=decays, TOKENS=chunk, LEVELS=chunk.bit_length() - 1, PIECE=piece, PAD=padded_requests(sizes.requests),
        WINDOW=sizes.window, CONV_DIM=sizes.conv_dim, PRECISION=precision, PDL=pdl, num_warps=config.num_warps,
        num_stages=1, **pdl_options(pdl),
    )
    return chunks
