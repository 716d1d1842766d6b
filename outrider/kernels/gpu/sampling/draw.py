"""Draws tokens from logits over the whole vocabulary: greedily, or by Gumbel-max with counter-based noise.

A logit row's token depends only on its logits and its sampling key. Ties go to the lowest id. A NaN is chosen before
everything else, so that the caller sees it. Penalties change the logits before this; top-k and top-p are in
`filtered_draw.py`."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from outrider.core.draft_confidence import LEVEL_BITS, MOST_PLACES, TOP_LEVEL
from outrider.kernels import sampling_flags as flags
from outrider.kernels.gpu.common import (
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
from outrider.kernels.gpu.launch.triton_kernel import kernel
from outrider.kernels.gpu.sampling.scans import (
    AS_IS,
    DIVIDE,
    GREEDY,
    NO_ID,
    SHIFT,
    best_of,
    load_logits,
    scan,
    scan_all,
    scan_greedy,
    scan_mass,
)
from outrider.kernels.sampling_keys import SamplingKeys

QUADS = 256  # Philox calls per tile; each serves four token ids
TILE = 4 * QUADS  # token ids that are read at a time
GROUP = 128  # token ids of a tile whose greatest logit is kept for top-k
_LONGEST_SPAN = 8  # tiles
_EDITED = tl.constexpr(flags.EDITED)
_TOP_LEVEL = tl.constexpr(TOP_LEVEL)


class Spans(NamedTuple):
    """The division of each logit row into spans of tiles, one span for each program, and the greatest logit of every
    span."""

    grid: tuple[int, int]  # (spans, logit rows)
    num_tiles: int  # of a logit row
    length: int  # tiles of a span
    greatest: torch.Tensor  # [logit rows, spans] float32
    group_greatest: torch.Tensor  # [logit rows, groups] float32, of every group: in logit rows with a top-k
    num_candidates: torch.Tensor  # [logit rows] int32: 0, in logit rows with a top-k

    @property
    def most(self) -> int:
        """An upper bound of the number of spans, which is the same for all span lengths, so that one compiled kernel
        serves them."""
        return next_power_of_two(self.num_tiles)


class DraftLevels(NamedTuple):
    """The place for the confidence levels of drafts: a tensor [logit rows] int64, and the index of these drafts in
    their chains."""

    packed: torch.Tensor
    place: int

    @property
    def shift(self) -> int:
        return LEVEL_BITS * self.place


# Tensors that may begin anywhere in a buffer: no reason to compile anew.
SLICES = ["row", "position", "ids", "temperature", "seed", "sample_index"]


@kernel(do_not_specialize=["span"], do_not_specialize_on_alignment=SLICES)
def _greatest_kernel(
    logits, row, temperature, span_greatest, logit_stride, vocab, num_tiles, span, SIZE: tl.constexpr, PDL: tl.constexpr
):
    """Find the greatest logit of each span, in logit rows that are not greedy."""
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
    """Return the number that is subtracted from every logit of a row: the greatest logit, if it is finite."""
    greatest = greatest_of_spans(span_greatest, num_spans, SPANS)
    return tl.where(tl.abs(greatest) < float("inf"), greatest, 0.0)


@triton.jit
def own_logits(logits, edited, at, logit_stride, edited_stride, flag):
    """Return the address of a logit row: that of the edited copy if the row asks for edits."""
    return tl.where((flag & _EDITED) != 0, edited + at * edited_stride, logits + at * logit_stride)


@kernel(do_not_specialize=["span"], do_not_specialize_on_alignment=SLICES)
def _score_kernel(
    logits, row, temperature, seed, sample_index, position, ids, span_greatest, span_scores, span_tokens, span_mass,
    logit_stride, vocab, num_tiles, span, HAS_ROWS: tl.constexpr, SCALE: tl.constexpr, MAPPED: tl.constexpr,
    LEVELLED: tl.constexpr, QUADS: tl.constexpr, SPANS: tl.constexpr, PDL: tl.constexpr,
):
    release_dependents(PDL)
    wait_for_inputs(PDL)
    at = tl.program_id(1).to(tl.int64)
    num_spans = tl.num_programs(0)
    first = tl.program_id(0) * span
    last = tl.minimum(first + span, num_tiles)
    own = logits + at * logit_stride
    if SCALE == GREEDY:
        top, chosen = scan_greedy(own, first, last, vocab, 4 * QUADS)
    else:
        of = at
        if HAS_ROWS:
            of = tl.load(row + at)
        own_temperature = tl.load(temperature + of)
        if own_temperature > 0:
            key = tl.load(seed + of)
            word1 = tl.load(position + at).to(tl.uint32)
            word2 = tl.load(sample_index + of).to(tl.uint32)
            if SCALE == SHIFT:
                shift = shift_of(span_greatest + at * num_spans, num_spans, SPANS)
                top, chosen = scan(
                    own, first, last, vocab, own_temperature, shift, float("-inf"), key, word1, word2, False, QUADS
                )
            else:
                top, chosen = scan_all(
                    own, ids, first, last, vocab, own_temperature, 0.0, float("-inf"), key, word1, word2, SCALE,
                    MAPPED, False, QUADS,
                )
        else:
            top, chosen = scan_greedy(own, first, last, vocab, 4 * QUADS)
    tl.store(span_scores + at * num_spans + tl.program_id(0), top)
    tl.store(span_tokens + at * num_spans + tl.program_id(0), chosen)
    if LEVELLED:
        greatest, mass = scan_mass(own, first, last, vocab, 4 * QUADS)
        tl.store(span_greatest + at * num_spans + tl.program_id(0), greatest)
        tl.store(span_mass + at * num_spans + tl.program_id(0), mass)


@triton.jit
def _level_of(logit, span_greatest, span_mass, num_spans, SPANS: tl.constexpr):
    """Return the confidence level of a chosen token (`core/draft_confidence.py`); 1 if the logits are not finite."""
    span = tl.arange(0, SPANS)
    valid = span < num_spans
    greatest = tl.load(span_greatest + span, mask=valid, other=float("-inf"))
    mass = tl.load(span_mass + span, mask=valid, other=0.0)
    top = tl.max(greatest, axis=0)
    total = tl.sum(tl.where(greatest == float("-inf"), 0.0, mass * tl.exp(greatest - top)), axis=0)
    share = tl.exp(logit - top) / total * _TOP_LEVEL
    share = tl.where(share >= 0, tl.minimum(share, _TOP_LEVEL - 1), 0.0)  # 0 for a NaN as well
    return 1 + share.to(tl.int64)


@kernel(do_not_specialize=["num_spans", "shift"], do_not_specialize_on_alignment=["row", "ids", "tokens", "levels"])
def _pick_kernel(
    span_scores, span_tokens, logits, ids, tokens, bad, span_greatest, span_mass, levels, logit_stride, num_spans,
    shift, CHECKED: tl.constexpr, MAPPED: tl.constexpr, LEVELLED: tl.constexpr, SPANS: tl.constexpr, PDL: tl.constexpr,
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
    if LEVELLED:
        logit = tl.load(logits + at * logit_stride + chosen).to(tl.float32)
        level = _level_of(logit, span_greatest + at * num_spans, span_mass + at * num_spans, num_spans, SPANS) << shift
        tl.store(levels + at, level | tl.load(levels + at, mask=shift > 0, other=0))
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
    levels: DraftLevels | None = None,
) -> None:
    """Score each span of a logit row in a program of its own, then take the best token of all spans."""
    num_logit_rows, vocab = logits.shape
    if num_logit_rows == 0:
        return
    pdl = uses_pdl(logits.device) if pdl is None else pdl
    spans, stride = plan_spans(logits), logits.stride(0)
    scores = torch.empty_like(spans.greatest)
    best = torch.empty(scores.shape, dtype=torch.int32, device=logits.device)
    mass = scores if levels is None else torch.empty_like(scores)
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
        logits, row, *keys, position, position if ids is None else ids, spans.greatest, scores, best, mass, stride,
        vocab, spans.num_tiles, spans.length, HAS_ROWS=row is not position, SCALE=scale.value, MAPPED=ids is not None,
        LEVELLED=levels is not None, QUADS=QUADS, SPANS=spans.most, num_warps=4, **options,
    )
    _pick_kernel[(num_logit_rows,)](
        scores, best, logits, tokens if ids is None else ids, tokens, tokens if bad is None else bad, spans.greatest,
        mass, tokens if levels is None else levels.packed, stride, spans.grid[0], 0 if levels is None else levels.shift,
        CHECKED=bad is not None, MAPPED=ids is not None, LEVELLED=levels is not None, SPANS=spans.most, num_warps=1,
        **options,
    )


def _tiles_per_span(num_tiles: int, sms: int) -> int:
    """Return how many tiles a program takes. With few tiles it is one; with many it is several, because starting a
    program takes as long as a tile."""
    return min(max(1, num_tiles // (8 * sms)), _LONGEST_SPAN)


def sample_logits(
    logits: torch.Tensor, temperature: torch.Tensor, seed: torch.Tensor, sample_index: torch.Tensor,
    position: torch.Tensor, *, ids: torch.Tensor | None = None, out: torch.Tensor | None = None,
    levels: DraftLevels | None = None, pdl: bool | None = None,
) -> torch.Tensor:
    """Sample tokens [logit rows] int64 from logits [logit rows, vocabulary]: the greatest of logit / temperature +
    noise.

    A row is greedy if its temperature (float32) is 0. The noise of token id t is lane t % 4 of Philox 4x32-10 with
    counter (t // 4, position, sample_index, 0) and the 64-bit seed as key. With `ids` [vocabulary], a column stands for
    the token id there, which decides its noise and is returned; ties go to the first column. levels: receives the
    tokens' confidence levels.
    """
    name, device, keys = "sample_logits", logits.device, SamplingKeys(temperature, seed, sample_index)
    _check(name, logits, keys, position, None)
    if out is None:
        out = torch.empty(logits.shape[0], dtype=torch.int64, device=device)
    else:
        require_tensor(name, "out", out, (logits.shape[0],), device, (torch.int64,))
    if ids is not None:
        require_tensor(name, "ids", ids, (logits.shape[1],), device, (torch.int64,))
    if levels is not None:
        require_tensor(name, "levels", levels.packed, (logits.shape[0],), device, (torch.int64,))
        levels = levels if levels.place < MOST_PLACES else None
    _launch(logits, keys, position, None, ids, DIVIDE, out, None, pdl, levels)
    return out


def draw_tokens(
    logits: torch.Tensor, row: torch.Tensor, position: torch.Tensor, keys: SamplingKeys, any_sampled: bool, *,
    pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample logit rows that need nothing but a temperature: returns (tokens, which rows are bad), both [logit rows].

    `keys` are the sampling keys of all rows. The score is (logit - greatest) / temperature + noise, with the same
    roundings as the sampler's separate steps. A row is bad if its choice is not finite; its token is then 0. If
    `any_sampled` is false, all rows are greedy.
    """
    _check("draw_tokens", logits, keys, position, row)
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    bad = torch.empty(logits.shape[0], dtype=torch.bool, device=logits.device)
    _launch(logits, keys, position, row, None, SHIFT if any_sampled else GREEDY, tokens, bad, pdl)
    return tokens, bad


def choose_scaled(
    scaled: torch.Tensor, row: torch.Tensor, position: torch.Tensor, keys: SamplingKeys, any_sampled: bool = True, *,
    pdl: bool | None = None,
) -> torch.Tensor:
    """Sample tokens [logit rows] from logits that are already divided by their temperatures. `any_sampled` is ignored
    here: one kernel serves greedy and sampled rows."""
    _check("choose_scaled", scaled, keys, position, row)
    tokens = torch.empty(scaled.shape[0], dtype=torch.int64, device=scaled.device)
    _launch(scaled, keys, position, row, None, AS_IS, tokens, None, pdl)
    return tokens
