"""The gated delta rule over a request's long run of known tokens, in chunks: the second of two launches.

The first launch (`prepare.py`) has computed everything that does not need the state, once for each chunk. Here each
program advances its part of the state through the chunks in order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.kernels.gpu.gated_delta.parts import EPS, next_save_of, save_checkpoints
from outrider.kernels.gpu.gated_delta.prepare import decays_around, record_of


@triton.jit
def _advance(state, chunk, slot, request, part, chunks, sizes, TOKENS: tl.constexpr, TILE: tl.constexpr,
             KEYS: tl.constexpr, TILES: tl.constexpr, PRECISION: tl.constexpr, Y_PRECISION: tl.constexpr):
    """Advance the state by one chunk, and store the chunk's outputs. Returns (the new state, the corrections [tokens,
    tile] that the chunk's tokens made)."""
    token, key, column = tl.arange(0, TOKENS), tl.arange(0, KEYS), tl.arange(0, TILE)
    record = record_of(chunks, slot + chunk, part.head, sizes.heads, TOKENS, KEYS, TILES * TILE)
    at_key = token[:, None] * KEYS + key[None, :]
    first_value = part.first_row - part.head * sizes.value_dim
    values = tl.load(record.solved_values + token[:, None] * (TILES * TILE) + (first_value + column)[None, :])
    turned = tl.trans(state)
    corrections = tl.dot(tl.load(record.solved_keys + at_key), turned, values, input_precision=PRECISION)
    y = tl.dot(tl.load(record.queries + at_key), turned, input_precision=Y_PRECISION)
    scores = tl.load(record.scores + token[:, None] * TOKENS + token[None, :])
    y = tl.dot(scores, corrections, y, input_precision=Y_PRECISION)
    begin = request.pending + chunk * TOKENS
    at = part.y[None, :] + ((request.token_row + begin + token).to(tl.int64) * sizes.out_dim)[:, None]
    is_there = begin + token < request.known_end
    tl.store(at, y.to(part.y.dtype.element_ty), mask=is_there[:, None] & part.has_value[None, :])
    kept = tl.load(record.kept + key)
    state = tl.dot(tl.trans(corrections), tl.load(record.added + at_key), state * kept[None, :],
                   input_precision=PRECISION)
    return state, corrections


@triton.jit
def _state_within(state, corrections, chunk, seen, slot, request, part, chunks, sizes, KEY_DIM: tl.constexpr,
                  DECAYS: tl.constexpr, TOKENS: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr,
                  TILES: tl.constexpr, PRECISION: tl.constexpr):
    """Return the state after the first `seen` tokens of a chunk. state: the state before the chunk."""
    token, key = tl.arange(0, TOKENS), tl.arange(0, KEYS)
    index = (request.fresh + request.pending + chunk * TOKENS + token).to(tl.int64)
    has_key = (token < seen)[:, None] & part.has_key[None, :]
    k = tl.load(part.k[None, :] + (index * sizes.conv_dim)[:, None], mask=has_key, other=0.0)
    k = k * tl.rsqrt(tl.sum(k * k, axis=1) + EPS)[:, None]
    g_size = sizes.heads * DECAYS
    since_start, to_end = decays_around(part.first_g, index, token < seen, token + 1 < seen, key, g_size, KEY_DIM,
                                        DECAYS)
    kept = tl.sum(tl.where(token[:, None] == TOKENS - 1, since_start, 0.0), axis=0)
    record = record_of(chunks, slot + chunk, part.head, sizes.heads, TOKENS, KEYS, TILES * TILE)
    kept = tl.where(seen > tl.load(record.num_finite), float("nan"), kept)
    return tl.dot(tl.trans(corrections), k * to_end, state * kept[None, :], input_precision=PRECISION)


@triton.jit
def scan_prepared(state, slot, request, part, chunks, saves, sizes, KEY_DIM: tl.constexpr, PAGE_WORDS: tl.constexpr,
               DECAYS: tl.constexpr, TOKENS: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr, TILES: tl.constexpr,
               PRECISION: tl.constexpr, Y_PRECISION: tl.constexpr, STAGES: tl.constexpr):
    """Advance the state over all known tokens. slot: the index of the first chunk's record. Chunks without a
    checkpoint's boundary go through a loop of nothing but loads and products, so that the compiler can load a chunk
    while it computes the one before."""
    num_chunks = tl.cdiv(request.known_end - request.pending, TOKENS)
    if PAGE_WORDS == 0:
        for chunk in tl.range(0, num_chunks, num_stages=STAGES):
            state, _ = _advance(state, chunk, slot, request, part, chunks, sizes, TOKENS, TILE, KEYS, TILES, PRECISION,
                                Y_PRECISION)
    else:
        chunk, begin = 0, request.begin + request.pending  # tokens before the first chunk
        last = request.begin + request.known_end
        next_save = next_save_of(begin, request, saves)
        while chunk < num_chunks:
            end = tl.where(next_save < 0, num_chunks, (next_save - 1 - begin) // TOKENS)
            for plain in tl.range(chunk, end, num_stages=STAGES):
                state, _ = _advance(state, plain, slot, request, part, chunks, sizes, TOKENS, TILE, KEYS, TILES,
                                    PRECISION, Y_PRECISION)
            if end < num_chunks:
                before = state
                state, corrections = _advance(before, end, slot, request, part, chunks, sizes, TOKENS, TILE, KEYS,
                                              TILES, PRECISION, Y_PRECISION)
                first, stop = begin + end * TOKENS, tl.minimum(begin + (end + 1) * TOKENS, last)
                while (next_save >= 0) & (next_save < stop):
                    within = _state_within(before, corrections, end, next_save - first, slot, request, part, chunks,
                                           sizes, KEY_DIM, DECAYS, TOKENS, TILE, KEYS, TILES, PRECISION)
                    save_checkpoints(within, next_save, request, part, saves, KEY_DIM, PAGE_WORDS)
                    next_save = next_save_of(next_save, request, saves)
                if next_save == stop:
                    save_checkpoints(state, next_save, request, part, saves, KEY_DIM, PAGE_WORDS)
                    next_save = next_save_of(next_save, request, saves)
            chunk = end + 1
    return state
