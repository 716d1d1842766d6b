"""Choosing tokens from logits: greedy, or Gumbel-max with counter-based noise, over the whole vocabulary.

A logit row's token depends on its logits and its key alone. Ties go to the lowest id; a NaN is
chosen before all else, so that the caller sees it.
Knows nothing of penalties, which change the logits before they come here, nor of top-k and top-p (`filtered_draw.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

import triton
import triton.language as tl
from outrider.kernels import sampling_flags as flags
from outrider.kernels.sampling_keys import SamplingKeys
from outrider.kernels.triton.common import (
    cdiv,
    next_power_of_two,
    num_sms,
    pdl_options,
    release_dependents,
    require,
    require_tensor,
    uses_pdl,
    wait_for_inputs,
)
from outrider.kernels.triton.launch import kernel

QUADS = 256  # Philox calls per tile; each serves four token ids
TILE = 4 * QUADS  # token ids that are read at a time
GROUP = 128  # token ids of a tile whose greatest logit is kept for top-k
_LONGEST_SPAN = 8  # tiles
_EDITED = tl.constexpr(flags.EDITED)
NO_ID = tl.constexpr(2147483647)
# What is done to a logit before its noise is added, if any is.
_GREEDY, _AS_IS, _DIVIDE, SHIFT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


class Spans(NamedTuple):
    """How each logit row is cut into spans of tiles, one for each program, and the greatest logit of every span."""

    grid: tuple[int, int]  # (spans, logit rows)
    num_tiles: int  # of a logit row
    length: int  # tiles of a span
    greatest: torch.Tensor  # [logit rows, spans] float32
    group_greatest: torch.Tensor  # [logit rows, groups] float32, of every group: in logit rows with a top-k
    num_candidates: torch.Tensor  # [logit rows] int32: 0, in logit rows with a top-k

    @property
    def most(self) -> int:
        """An extent that no number of spans exceeds: one kernel serves all lengths of a span."""
        return next_power_of_two(self.num_tiles)


@triton.jit
def gumbel(bits):
    """Standard Gumbel noise from 32 random bits; log1p is spelled out, as log(1 - v) loses small v."""
    v = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.9999999403953552)
    u = 1.0 - v
    log1p = tl.where(u == 1.0, -v, tl.log(u) * (v / tl.where(u == 1.0, 1.0, 1.0 - u)))
    return -tl.log(-log1p)


@triton.jit
def better(score, token, best_score, best_token):
    wins = (score > best_score) | ((score == best_score) & (token < best_token))
    return tl.where(wins, score, best_score), tl.where(wins, token, best_token)


@triton.jit
def best_of(score, token):
    """(highest score, lowest token that has it) of a tile."""
    top = tl.max(score, axis=0)
    return top, tl.min(tl.where(score == top, token, NO_ID), axis=0)


@triton.jit
def load_logits(logits, token, valid):
    """A NaN counts as the greatest, so that it is chosen and the caller sees it."""
    logit = tl.load(logits + token, mask=valid, other=float("-inf")).to(tl.float32)
    return tl.where(logit == logit, logit, float("inf"))


@triton.jit
def load_quads(logits, quad, vocab, QUADS: tl.constexpr):
    """The four logits of each quad, as `load_logits` gives them, read together."""
    token = quad[:, None] * 4 + tl.arange(0, 4)[None, :]
    even, odd = tl.split(tl.reshape(load_logits(logits, token, token < vocab), [QUADS, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def word_of(ids, token, valid, key, word1, word2, zero):
    """32 random bits by the id that a token stands for."""
    target = tl.load(ids + token, mask=valid, other=0)
    words = tl.philox(key, (target // 4).to(tl.uint32), zero + word1, zero + word2, zero)
    lane = target % 4
    low, high = tl.where(lane == 0, words[0], words[1]), tl.where(lane == 2, words[2], words[3])
    return tl.where(lane < 2, low, high)


@triton.jit
def scan(
    logits, first, last, vocab, heat, shift, threshold, key, word1, word2, FULL: tl.constexpr, QUADS: tl.constexpr
):
    """The best (score, token) of tiles [first, last), as `scan_all` finds it with SHIFT, mostly without its logarithms.

    With noise -log(e), e exponentially distributed, the best score belongs to the least e / exp(scaled). A key, v /
    exp(scaled), is less work: v, the uniform number that e is made of, is never greater than e and hardly less where it
    is small. So a token's score is computed only if its key is the least of its place in all tiles. That is enough if
    no other key of a place is as small as one that could belong to the best score; else all is done again, in full."""
    zero = tl.zeros([QUADS], dtype=tl.uint32)
    least = tl.full([QUADS], float("inf"), dtype=tl.float32)
    second = tl.full([QUADS], float("inf"), dtype=tl.float32)
    token_of = tl.full([QUADS], NO_ID, dtype=tl.int32)
    bits_of = tl.full([QUADS], 0, dtype=tl.uint32)
    slope = -1.4426950408889634 / heat
    lowest = threshold - tl.abs(threshold) * 1e-6  # a quotient's rounding
    for tile in range(first, last):
        quad = tile * QUADS + tl.arange(0, QUADS)
        bits = tl.philox(key, quad.to(tl.uint32), zero + word1, zero + word2, zero)
        logit = load_quads(logits, quad, vocab, QUADS)
        for lane in tl.static_range(4):
            token = quad * 4 + lane
            power = (logit[lane] - shift) * slope
            own = (bits[lane].to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10) * tl.exp2(power)
            if FULL:
                own = tl.where(power <= lowest * -1.4426950408889634, own, float("inf"))
            is_less = own < least
            second = tl.minimum(second, tl.where(is_less, least, own))
            least = tl.where(is_less, own, least)
            token_of = tl.where(is_less, token, token_of)
            bits_of = tl.where(is_less, bits[lane], bits_of)
    is_token = token_of < vocab
    scaled = tl.div_rn(load_logits(logits, token_of, is_token) - shift, heat)
    score = tl.where(is_token, scaled + gumbel(bits_of), float("-inf"))
    is_kept = is_token
    if FULL:
        is_kept = scaled >= threshold
        score = tl.where(is_kept, score, float("-inf"))
    best, chosen = best_of(score, token_of)
    # Roundings of keys and scores together stay far below a thousandth.
    bound = tl.exp2(best * -1.4426950408889634) * 1.001
    is_open = (second <= bound) | ((least <= bound) & (not is_kept))
    if (tl.max(is_open.to(tl.int32), axis=0) > 0) | (best == float("-inf")):
        best, chosen = scan_all(
            logits, logits, first, last, vocab, heat, shift, threshold, key, word1, word2, SHIFT, False, FULL, QUADS
        )
    return best, chosen


@triton.jit
def scan_all(
    logits, ids, first, last, vocab, heat, shift, threshold, key, word1, word2,
    SCALE: tl.constexpr, MAPPED: tl.constexpr, FULL: tl.constexpr, QUADS: tl.constexpr,
):
    """The best (score, token) of tiles [first, last), each of them four token ids of each quad, with their noise."""
    zero = tl.zeros([QUADS], dtype=tl.uint32)
    best_score = tl.full([QUADS], float("-inf"), dtype=tl.float32)
    best_token = tl.full([QUADS], NO_ID, dtype=tl.int32)
    for tile in range(first, last):
        quad = tile * QUADS + tl.arange(0, QUADS)
        if not MAPPED:
            bits = tl.philox(key, quad.to(tl.uint32), zero + word1, zero + word2, zero)
        for lane in tl.static_range(4):
            token = quad * 4 + lane
            valid = token < vocab
            score = load_logits(logits, token, valid)
            if SCALE == SHIFT:
                score = tl.div_rn(score - shift, heat)
            elif SCALE == _DIVIDE:
                score = tl.div_rn(score, heat)
            is_kept = score >= threshold
            if MAPPED:
                score += gumbel(word_of(ids, token, valid, key, word1, word2, zero))
            else:
                score += gumbel(bits[lane])
            if FULL:
                score = tl.where(is_kept, score, float("-inf"))
            best_score, best_token = better(score, tl.where(valid, token, NO_ID), best_score, best_token)
    return best_of(best_score, best_token)


@triton.jit
def scan_greedy(logits, first, last, vocab, SIZE: tl.constexpr):
    """The best (logit, token) of tiles [first, last), without noise; tokens are read in order."""
    best_score = tl.full([SIZE], float("-inf"), dtype=tl.float32)
    best_token = tl.full([SIZE], NO_ID, dtype=tl.int32)
    for tile in range(first, last):
        token = tile * SIZE + tl.arange(0, SIZE)
        valid = token < vocab
        score = load_logits(logits, token, valid)
        best_score, best_token = better(score, tl.where(valid, token, NO_ID), best_score, best_token)
    return best_of(best_score, best_token)


# Tensors that may begin anywhere in a buffer: no reason to compile anew.
SLICES = ["row", "position", "ids", "temperature", "seed", "sample_index"]


@kernel(do_not_specialize=["span"], do_not_specialize_on_alignment=SLICES)
def _greatest_kernel(
    logits, row, temperature, span_greatest, logit_stride, vocab, num_tiles, span, SIZE: tl.constexpr, PDL: tl.constexpr
):
    """The greatest logit of each span, in logit rows that are not greedy."""
    release_dependents(PDL)
    wait_for_inputs(PDL)
    at = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * span
    if tl.load(temperature + tl.load(row + at)) > 0:
        greatest = tl.full([SIZE], float("-inf"), dtype=tl.float32)
        for tile in range(first, tl.minimum(first + span, num_tiles)):
            token = tile * SIZE + tl.arange(0, SIZE)
            greatest = tl.maximum(greatest, load_logits(logits + at * logit_stride, token, token < vocab))
        tl.store(span_greatest + at * tl.num_programs(0) + tl.program_id(0), tl.max(greatest, axis=0))


@triton.jit
def greatest_of_spans(span_greatest, num_spans, SPANS: tl.constexpr):
    of = tl.arange(0, SPANS)
    return tl.max(tl.load(span_greatest + of, mask=of < num_spans, other=float("-inf")), axis=0)


@triton.jit
def shift_of(span_greatest, num_spans, SPANS: tl.constexpr):
    """The number taken from every logit of a row: the greatest, if it is finite."""
    greatest = greatest_of_spans(span_greatest, num_spans, SPANS)
    return tl.where(tl.abs(greatest) < float("inf"), greatest, 0.0)


@triton.jit
def own_logits(logits, edited, at, logit_stride, edited_stride, flag):
    """Address from which a logit row is read: the edited copy, if its row asks for edits."""
    return tl.where((flag & _EDITED) != 0, edited + at * edited_stride, logits + at * logit_stride)


@kernel(do_not_specialize=["span"], do_not_specialize_on_alignment=SLICES)
def _score_kernel(
    logits, row, temperature, seed, sample_index, position, ids, span_greatest, span_scores, span_tokens, logit_stride,
    vocab, num_tiles, span, HAS_ROWS: tl.constexpr, SCALE: tl.constexpr, MAPPED: tl.constexpr, QUADS: tl.constexpr,
    SPANS: tl.constexpr, PDL: tl.constexpr,
):
    release_dependents(PDL)
    wait_for_inputs(PDL)
    at = tl.program_id(1).to(tl.int64)
    num_spans = tl.num_programs(0)
    first = tl.program_id(0) * span
    last = tl.minimum(first + span, num_tiles)
    own = logits + at * logit_stride
    if SCALE == _GREEDY:
        top, chosen = scan_greedy(own, first, last, vocab, 4 * QUADS)
    else:
        of = at
        if HAS_ROWS:
            of = tl.load(row + at)
        heat = tl.load(temperature + of)
        if heat > 0:
            key = tl.load(seed + of)
            word1 = tl.load(position + at).to(tl.uint32)
            word2 = tl.load(sample_index + of).to(tl.uint32)
            if SCALE == SHIFT:
                shift = shift_of(span_greatest + at * num_spans, num_spans, SPANS)
                top, chosen = scan(
                    own, first, last, vocab, heat, shift, float("-inf"), key, word1, word2, False, QUADS
                )
            else:
                top, chosen = scan_all(
                    own, ids, first, last, vocab, heat, 0.0, float("-inf"), key, word1, word2, SCALE, MAPPED, False,
                    QUADS,
                )  # fmt: skip
        else:
            top, chosen = scan_greedy(own, first, last, vocab, 4 * QUADS)
    tl.store(span_scores + at * num_spans + tl.program_id(0), top)
    tl.store(span_tokens + at * num_spans + tl.program_id(0), chosen)


@kernel(do_not_specialize=["num_spans"], do_not_specialize_on_alignment=["row", "ids", "tokens"])
def _pick_kernel(
    span_scores, span_tokens, logits, ids, tokens, bad, logit_stride, num_spans, CHECKED: tl.constexpr,
    MAPPED: tl.constexpr, SPANS: tl.constexpr, PDL: tl.constexpr,
):
    release_dependents(PDL)
    wait_for_inputs(PDL)
    at = tl.program_id(0).to(tl.int64)
    span = tl.arange(0, SPANS)
    valid = span < num_spans
    score = tl.load(span_scores + at * num_spans + span, mask=valid, other=float("-inf"))
    token = tl.load(span_tokens + at * num_spans + span, mask=valid, other=NO_ID)
    _, chosen = best_of(score, token)
    if CHECKED:
        logit = tl.load(logits + at * logit_stride + chosen).to(tl.float32)
        is_bad = (tl.abs(logit) < float("inf")) == 0  # also where it is a NaN
        tl.store(bad + at, is_bad)
        chosen = tl.where(is_bad, 0, chosen)
    if MAPPED:
        tl.store(tokens + at, tl.load(ids + chosen))
    else:
        tl.store(tokens + at, chosen.to(tl.int64))


def _check(
    name: str, logits: torch.Tensor, keys: SamplingKeys, position: torch.Tensor, row: torch.Tensor | None
) -> None:
    device, integers = logits.device, (torch.int64, torch.int32)
    require_tensor(name, "logits", logits, (None, None), device, (torch.float32, torch.bfloat16))
    num_logit_rows, vocab = logits.shape
    require(vocab > 0, name, "logits", "has no columns")
    num_keys: int | None = num_logit_rows
    if row is not None:
        require_tensor(name, "row", row, (num_logit_rows,), device, (torch.int64,))
        num_keys = keys.seed.shape[0]
    require_tensor(name, "temperature", keys.temperature, (num_keys,), device, (torch.float32,))
    require_tensor(name, "seed", keys.seed, (num_keys,), device, (torch.int64,))
    require_tensor(name, "sample_index", keys.sample_index, (num_keys,), device, integers)
    require_tensor(name, "position", position, (num_logit_rows,), device, integers)


def plan_spans(logits: torch.Tensor) -> Spans:
    num_logit_rows, vocab = logits.shape
    num_tiles = cdiv(vocab, TILE)
    length = _tiles_per_span(num_tiles * num_logit_rows, num_sms(logits.device))
    grid = (cdiv(num_tiles, length), num_logit_rows)
    greatest, group_greatest = (
        torch.empty(num_logit_rows, width, dtype=torch.float32, device=logits.device)
        for width in (grid[0], num_tiles * (TILE // GROUP))
    )
    num_candidates = torch.empty(num_logit_rows, dtype=torch.int32, device=logits.device)
    return Spans(grid, num_tiles, length, greatest, group_greatest, num_candidates)


def _launch(
    logits: torch.Tensor, keys: SamplingKeys, position: torch.Tensor, row: torch.Tensor | None,
    ids: torch.Tensor | None, scale: tl.constexpr, tokens: torch.Tensor, bad: torch.Tensor | None, pdl: bool | None,
) -> None:
    """Spans of each logit row are scored by programs of their own; then the best span's token is taken."""
    num_logit_rows, vocab = logits.shape
    if num_logit_rows == 0:
        return
    pdl = uses_pdl(logits.device) if pdl is None else pdl
    spans, stride = plan_spans(logits), logits.stride(0)
    scores = torch.empty_like(spans.greatest)
    best = torch.empty(scores.shape, dtype=torch.int32, device=logits.device)
    # Without fusion every kernel that scores a token rounds alike.
    options = {"PDL": pdl, "enable_fp_fusion": False, **pdl_options(pdl)}
    if scale.value == SHIFT.value:
        assert row is not None
        _greatest_kernel[spans.grid](
            logits, row, keys.temperature, spans.greatest, stride, vocab, spans.num_tiles, spans.length,
            SIZE=TILE, num_warps=4, **options,
        )
    row = position if row is None else row
    _score_kernel[spans.grid](
        logits, row, *keys, position, position if ids is None else ids, spans.greatest, scores, best, stride, vocab,
        spans.num_tiles, spans.length, HAS_ROWS=row is not position, SCALE=scale.value, MAPPED=ids is not None,
        QUADS=QUADS, SPANS=spans.most, num_warps=4, **options,
    )
    _pick_kernel[(num_logit_rows,)](
        scores, best, logits, tokens if ids is None else ids, tokens, tokens if bad is None else bad, stride,
        spans.grid[0], CHECKED=bad is not None, MAPPED=ids is not None, SPANS=spans.most, num_warps=1, **options,
    )


def _tiles_per_span(num_tiles: int, sms: int) -> int:
    """Few tiles are spread over the card; of many a program takes several, as its start costs as much as a tile."""
    return min(max(1, num_tiles // (8 * sms)), _LONGEST_SPAN)


def sample_logits(
    logits: torch.Tensor, temperature: torch.Tensor, seed: torch.Tensor, sample_index: torch.Tensor,
    position: torch.Tensor, *, ids: torch.Tensor | None = None, out: torch.Tensor | None = None,
    pdl: bool | None = None,
) -> torch.Tensor:
    """logits [logit rows, vocabulary] -> tokens [logit rows] int64: the greatest of logit / temperature + noise.

    Greedy where temperature (float32) is 0. Noise of token id t is lane t % 4 of Philox 4x32-10 with counter
    (t // 4, position, sample_index, 0) and the 64-bit seed as key. With `ids` [vocabulary] a column stands for that
    id, by which its noise goes and which is returned; ties go to the first column.
    """
    name, device, keys = "sample_logits", logits.device, SamplingKeys(temperature, seed, sample_index)
    _check(name, logits, keys, position, None)
    if out is None:
        out = torch.empty(logits.shape[0], dtype=torch.int64, device=device)
    else:
        require_tensor(name, "out", out, (logits.shape[0],), device, (torch.int64,))
    if ids is not None:
        require_tensor(name, "ids", ids, (logits.shape[1],), device, (torch.int64,))
    _launch(logits, keys, position, None, ids, _DIVIDE, out, None, pdl)
    return out


def draw_tokens(
    logits: torch.Tensor, row: torch.Tensor, position: torch.Tensor, keys: SamplingKeys, any_sampled: bool, *,
    pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole sampler of logit rows that ask for no more than a temperature: (tokens, which are bad) [logit rows].

    `keys` are those of all rows. The score is (logit - greatest) / temperature + noise, rounded as the sampler's own
    steps round it. Bad are rows whose choice is not finite; their token is 0. With `any_sampled` false all are greedy.
    """
    _check("draw_tokens", logits, keys, position, row)
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    bad = torch.empty(logits.shape[0], dtype=torch.bool, device=logits.device)
    _launch(logits, keys, position, row, None, SHIFT if any_sampled else _GREEDY, tokens, bad, pdl)
    return tokens, bad


def choose_scaled(
    scaled: torch.Tensor, row: torch.Tensor, position: torch.Tensor, keys: SamplingKeys, any_sampled: bool = True, *,
    pdl: bool | None = None,
) -> torch.Tensor:
    """Tokens [logit rows] from logits that have been divided by their temperatures: the greatest after noise. Whether
    any is sampled makes no difference here: one kernel serves both."""
    _check("choose_scaled", scaled, keys, position, row)
    tokens = torch.empty(scaled.shape[0], dtype=torch.int64, device=scaled.device)
    _launch(scaled, keys, position, row, None, _AS_IS, tokens, None, pdl)
    return tokens
