"""Choosing tokens from logits: greedy, or Gumbel-max with counter-based noise, over the whole vocabulary.

A logit row's token depends on its logits and its key alone. Ties go to the lowest id; a NaN is
chosen before all else, so that the caller sees it.
Knows nothing of penalties or truncation: those change the logits before they come here.
"""

from __future__ import annotations

import torch

import triton
import triton.language as tl
from outrider.kernels.triton.common import (
    next_power_of_two,
    pdl_options,
    release_dependents,
    require,
    require_tensor,
    wait_for_inputs,
)

_QUADS = 256  # Philox calls per program; each serves four token ids
_NO_ID = tl.constexpr(2147483647)


@triton.jit
def _gumbel(bits):
    """Standard Gumbel noise from 32 random bits; log1p is spelled out, as log(1 - v) loses small v."""
    v = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.9999999403953552)
    u = 1.0 - v
    log1p = tl.where(u == 1.0, -v, tl.log(u) * (v / tl.where(u == 1.0, 1.0, 1.0 - u)))
    return -tl.log(-log1p)


@triton.jit
def _better(score, token, best_score, best_token):
    wins = (score > best_score) | ((score == best_score) & (token < best_token))
    return tl.where(wins, score, best_score), tl.where(wins, token, best_token)


@triton.jit
def _best(score, token):
    """(highest score, lowest token that has it) of a tile."""
    top = tl.max(score, axis=0)
    return top, tl.min(tl.where(score == top, token, _NO_ID), axis=0)


@triton.jit
def _scan(logits, quad, vocab, heat, key, word1, word2, RANDOM: tl.constexpr, QUADS: tl.constexpr):
    """The best (score, token) among the four token ids of each quad."""
    if RANDOM:
        zero = tl.zeros([QUADS], dtype=tl.uint32)
        bits = tl.philox(key, quad.to(tl.uint32), zero + word1, zero + word2, zero)
    best_score = tl.full([QUADS], float("-inf"), dtype=tl.float32)
    best_token = tl.full([QUADS], _NO_ID, dtype=tl.int32)
    for lane in tl.static_range(4):
        token = quad * 4 + lane
        valid = token < vocab
        score = tl.load(logits + token, mask=valid, other=float("-inf")).to(tl.float32)
        score = tl.where(score == score, score, float("inf"))  # a NaN is chosen, so that the caller sees it
        if RANDOM:
            score = tl.div_rn(score, heat) + _gumbel(bits[lane])
        best_score, best_token = _better(score, tl.where(valid, token, _NO_ID), best_score, best_token)
    return _best(best_score, best_token)


@triton.jit(do_not_specialize_on_alignment=["temperature", "seed", "sample_index", "position"])
def _score_kernel(
    logits, temperature, seed, sample_index, position, tile_scores, tile_tokens, row_stride, vocab, num_tiles,
    QUADS: tl.constexpr, PDL: tl.constexpr,
):
    release_dependents(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(0)
    quad = tile * QUADS + tl.arange(0, QUADS)
    heat = tl.load(temperature + row)
    key = tl.load(seed + row)
    word1 = tl.load(position + row).to(tl.uint32)
    word2 = tl.load(sample_index + row).to(tl.uint32)
    if heat > 0:
        top, chosen = _scan(logits + row * row_stride, quad, vocab, heat, key, word1, word2, True, QUADS)
    else:
        top, chosen = _scan(logits + row * row_stride, quad, vocab, heat, key, word1, word2, False, QUADS)
    tl.store(tile_scores + row * num_tiles + tile, top)
    tl.store(tile_tokens + row * num_tiles + tile, chosen)


@triton.jit
def _pick_kernel(tile_scores, tile_tokens, tokens, num_tiles, TILES: tl.constexpr, PDL: tl.constexpr):
    release_dependents(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES)
    valid = tile < num_tiles
    score = tl.load(tile_scores + row * num_tiles + tile, mask=valid, other=float("-inf"))
    token = tl.load(tile_tokens + row * num_tiles + tile, mask=valid, other=_NO_ID)
    _, chosen = _best(score, token)
    tl.store(tokens + row, chosen.to(tl.int64))


def sample_logits(
    logits: torch.Tensor, temperature: torch.Tensor, seed: torch.Tensor, sample_index: torch.Tensor,
    position: torch.Tensor, *, out: torch.Tensor | None = None, pdl: bool = False,
) -> torch.Tensor:
    """logits [logit rows, vocabulary] -> tokens [logit rows] int64.

    Greedy where temperature (float32) is 0. Noise of token id t is lane t % 4 of Philox 4x32-10 with counter
    (t // 4, position, sample_index, 0) and the 64-bit seed as key.
    """
    name, device = "sample_logits", logits.device
    require_tensor(name, "logits", logits, (None, None), device, (torch.float32, torch.bfloat16))
    num_rows, vocab = logits.shape
    require(vocab > 0, name, "logits", "has no columns")
    integers = (torch.int64, torch.int32)
    require_tensor(name, "temperature", temperature, (num_rows,), device, (torch.float32,))
    require_tensor(name, "seed", seed, (num_rows,), device, (torch.int64,))
    require_tensor(name, "sample_index", sample_index, (num_rows,), device, integers)
    require_tensor(name, "position", position, (num_rows,), device, integers)
    if out is None:
        out = torch.empty(num_rows, dtype=torch.int64, device=device)
    require_tensor(name, "out", out, (num_rows,), device, (torch.int64,))
    if num_rows == 0:
        return out
    num_tiles = triton.cdiv(vocab, 4 * _QUADS)
    scores = torch.empty(num_rows, num_tiles, dtype=torch.float32, device=device)
    tokens = torch.empty(num_rows, num_tiles, dtype=torch.int32, device=device)
    _score_kernel[(num_tiles, num_rows)](
        logits, temperature, seed, sample_index, position, scores, tokens, logits.stride(0), vocab, num_tiles,
        QUADS=_QUADS, PDL=pdl, num_warps=4, **pdl_options(pdl),
    )
    _pick_kernel[(num_rows,)](
        scores, tokens, out, num_tiles, TILES=next_power_of_two(num_tiles), PDL=pdl, num_warps=1, **pdl_options(pdl),
    )
    return out
