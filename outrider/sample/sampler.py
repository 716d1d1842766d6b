"""The sampler: chooses one token for every logit row, with drafts or without, greedily or at random. All steps use it.

A logit row's token depends on its logits, its request's parameters, its history and its sampling key. It does not
depend on the other logit rows, their order or number. The host reads no device tensor. Other code decides which tokens
are accepted and kept.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

from outrider.kernels.buffers import to_device
from outrider.kernels.ops import FLOAT32, Exactness, Operation, native_kernel, triton_kernel
from outrider.sample.draw import choose_scaled, draw_tokens
from outrider.sample.edits import (
    add_bias,
    allow_by_masks,
    allow_only,
    forbid_bad_words,
    forbid_early_stops,
    penalise,
)
from outrider.sample.extras import StepExtras, StepNeeds
from outrider.sample.filters import keep_likely, scale
from outrider.sample.logprobs import KERNEL_MAX_LOGPROBS, LogprobRows, logprob_rows
from outrider.sample.sampling_batch import History, LogitRows
from outrider.sample.sampling_rows import SamplingRows

LogprobsMode = Literal["raw", "processed"]

# Logits worked on at a time: bounds the scratch, which kernels need less of.
CHUNK_ELEMENTS = 2**24
KERNEL_CHUNK_ELEMENTS = 2**26
_ALIGNED = 16  # logit rows: kernels are compiled once for all chunks


class Sampled(NamedTuple):
    tokens: torch.Tensor  # [L] int64; 0 where bad
    bad: torch.Tensor  # [L] bool: the logits held a NaN or +inf, or nothing that may be chosen
    logprobs: LogprobRows | None  # kernels leave logit rows unwritten that do not ask


@dataclass(frozen=True)
class Asked:
    """Some logit rows with the parameters of their requests: everything that the sampler needs besides the logits."""

    logit_rows: LogitRows
    rows: SamplingRows
    history: History
    needs: StepNeeds
    extras: StepExtras
    logprobs: LogprobsMode

    def between(self, start: int, stop: int) -> Asked:
        at, own = slice(start, stop), self.logit_rows
        some = LogitRows(own.request[at], own.row[at], own.draft_index[at], own.position[at])
        return replace(self, logit_rows=some, extras=self.extras.between(start, stop))


def sample(
    logits: torch.Tensor,
    logit_rows: LogitRows,
    rows: SamplingRows,
    history: History,
    needs: StepNeeds,
    extras: StepExtras,
    *,
    logprobs: LogprobsMode = "raw",
    chunk_elements: int | None = None,
    row_by_row: bool = False,
) -> Sampled:
    """Choose a token for each row of logits [L, V], which are float32 or float64 and stay unchanged. Kernels read all
    parameters from the rows. The torch code takes lists from `extras`, which must be made for this batch. row_by_row:
    compute one logit row at a time where a library's rounding could depend on the other rows."""
    num, vocab = logits.shape
    assert num == len(logit_rows), f"{num} rows of logits for {len(logit_rows)} logit rows"
    assert logits.dtype in (torch.float32, torch.float64), f"logits are {logits.dtype}; narrower ones make ties"
    drawn = logits, logit_rows.row, logit_rows.position, rows.keys, needs.any_sampled
    if needs.is_draw and (draw := draw_tokens.choose(*drawn)) is not draw_tokens.reference:
        return Sampled(*draw(*drawn), None)  # in one go: there is no scratch
    asked = Asked(logit_rows, rows, history, needs, extras, logprobs)
    if needs.is_edited:
        chunk_elements = logits.numel()
    elif row_by_row and (needs.any_sampled or needs.max_logprobs is not None):
        chunk_elements = 1
    if chunk_elements is None:
        chunk_elements = KERNEL_CHUNK_ELEMENTS if sample_chunk.has_kernel(logits, asked) else CHUNK_ELEMENTS
    height = max(1, chunk_elements // vocab)
    if num <= height:
        return sample_chunk(logits, asked)
    height -= height % _ALIGNED if height > _ALIGNED else 0
    cuts = [(start, min(start + height, num)) for start in range(0, num, height)]
    parts = [sample_chunk(logits[slice(*cut)], asked.between(*cut)) for cut in cuts]
    found = [part.logprobs for part in parts if part.logprobs is not None]
    return Sampled(
        torch.cat([part.tokens for part in parts]),
        torch.cat([part.bad for part in parts]),
        LogprobRows.join(found) if found else None,
    )


def _sample_chunk(logits: torch.Tensor, asked: Asked) -> Sampled:
    """Run the stages of the sampler in order, over all logit rows of a chunk."""
    at, rows, needs, editor = asked.logit_rows, asked.rows, asked.needs, asked.extras.editor
    asked.extras.check(needs)
    num_logprobs, is_raw = needs.max_logprobs, asked.logprobs == "raw"
    edited = edit_logits(logits, asked) if needs.any_edits else logits
    shaped = edited
    if needs.any_sampled or editor is not None or (num_logprobs is not None and not is_raw):
        shaped = shape_logits(edited, asked)
    best = choose_scaled(shaped, at.row, at.position, rows.keys, needs.any_sampled)
    # A NaN or +inf is always the choice, so one look at the chosen logit finds it; -inf means nothing was left.
    bad = ~shaped.gather(1, best[:, None]).squeeze(1).isfinite()
    if edited is not logits:
        bad |= ~logits.amax(dim=1).isfinite()
    if editor is not None and editor.failed_rows:
        bad.index_fill_(0, to_device(editor.failed_rows, torch.int64, bad.device), True)
    tokens = best.masked_fill(bad, 0)  # the same in every batch
    if num_logprobs is None:
        return Sampled(tokens, bad, None)
    return Sampled(tokens, bad, logprob_rows(logits if is_raw else shaped, tokens, num_logprobs))


def shape_logits(edited: torch.Tensor, asked: Asked) -> torch.Tensor:
    """Prepare edited logits for a draw: divide them by the temperatures, and set the tokens that a filter drops to
    -inf."""
    shaped = scale(edited, asked.logit_rows.row, asked.rows)
    keep_likely(shaped, asked.logit_rows.row, asked.rows, asked.needs, asked.extras.editor)
    return shaped


def process_logits(logits: torch.Tensor, asked: Asked) -> torch.Tensor:
    """Edit, scale and filter logits as for a draw. Log-probabilities in mode "processed" are computed from the
    result."""
    asked.extras.check(asked.needs)
    return shape_logits(edit_logits(logits, asked) if asked.needs.any_edits else logits, asked)


def edit_logits(logits: torch.Tensor, asked: Asked) -> torch.Tensor:
    """Return a copy of the logits with the edits that requests ask for, such as biases and penalties. The order of the
    edits is fixed, because the result depends on it."""
    own, at, extras = logits.clone(memory_format=torch.contiguous_format), asked.logit_rows, asked.extras
    if extras.allowed is not None:
        allow_only(own, extras.allowed, at, asked.rows)
    for words in extras.bad_words:
        forbid_bad_words(own, words, at, asked.history)
    if asked.needs.any_min_tokens:
        forbid_early_stops(own, at, asked.rows)
    if extras.bias is not None:
        add_bias(own, extras.bias)
    if extras.editor is not None:
        extras.editor.edit(own)
    if asked.needs.any_penalties:
        penalise(own, at, asked.rows, asked.history, asked.needs)
    if asked.needs.any_masks:
        allow_by_masks(own, at, asked.rows)
    return own


def kernels_serve(needs: StepNeeds) -> bool:
    """Whether kernels can sample a step with these needs. Kernels cannot report the log-probabilities of a whole
    vocabulary, read lists that did not fit into the arena on the device, or call an editor."""
    num = needs.max_logprobs
    return needs.are_lists_placed and not needs.is_edited and (num is None or 0 <= num <= KERNEL_MAX_LOGPROBS)


sample_chunk = Operation(
    _sample_chunk,
    native_kernel("outrider.sample.native:sample_native", FLOAT32, "outrider.sample.native:takes_sample"),
    triton_kernel("outrider.sample.fused:sample_fused", FLOAT32, lambda logits, asked: kernels_serve(asked.needs)),
    name="sample_chunk", exact=Exactness.ROW_BY_ROW,
)
