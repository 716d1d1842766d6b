"""The sampler on a CPU: one call of C code that serves all sampling parameters, which it reads from row state.

It chooses exactly the tokens that the torch code of this folder chooses. All float32 logits go through it, so that the
bits of a logit row's result do not depend on the parameters of other requests of the batch. If the C code cannot read a
row's lists, or cannot report so many log-probabilities, the torch code does that part, with operations that every
library rounds alike."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch

from outrider.core.params import MAX_LOGPROBS_ALL
from outrider.kernels.cpu.checks import is_index, is_matrix
from outrider.kernels.cpu.sampling import Report, Text, pack_rows, sample_rows
from outrider.kernels.reported_logprobs import ReportedLogprobs
from outrider.sample.logprobs import LogprobRows, many_logprob_rows
from outrider.sample.sampler import Asked, Sampled, edit_logits, kernels_serve, shape_logits
from outrider.sample.sampling_rows import SamplingRows

_FIELDS = ("temperature", "seed", "sample_index", "flags", "top_k", "min_tokens", "prompt_len", "num_stop_ids",
           "num_logprobs", "bias_start", "bias_len", "words_start", "num_words", "top_p", "min_p_floor", "presence",
           "frequency", "repetition", "stop_ids")


def takes_sample(logits: torch.Tensor, asked: Asked) -> bool:
    at, history = asked.logit_rows, asked.history
    return (
        not asked.needs.is_edited
        and is_matrix(logits) and is_index(at.row) and is_index(at.position) and is_index(at.draft_index)
        and is_index(history.known) and history.tokens.dtype is history.drafts.dtype is torch.int64
        and history.tokens.is_cpu and history.tokens.stride(1) == 1
        and (history.drafts.shape[1] == 0 or history.drafts.stride(1) == 1)
    )


def sample_native(logits: torch.Tensor, asked: Asked) -> Sampled:
    at, needs, history = asked.logit_rows, asked.needs, asked.history
    is_served = kernels_serve(needs)
    edited = None
    if needs.any_edits and not is_served:
        asked.extras.check(needs)
        edited = edit_logits(logits, asked)
    report = None
    if needs.max_logprobs is not None:
        num_top = min(needs.max_logprobs, logits.shape[1]) if is_served else 0
        report = Report(num_top, asked.logprobs == "processed")
    tokens, bad, reported = sample_rows(
        logits, at.row, at.position, _packed(asked.rows), needs.any_sampled, draft_index=at.draft_index,
        text=Text(history.tokens, history.known, history.drafts), edited=edited, report=report,
    )
    if reported is None:
        return Sampled(tokens, bad, None)
    if is_served:
        return Sampled(tokens, bad, LogprobRows(reported.ids, reported.values))
    return Sampled(tokens, bad, _many_logprobs(logits, edited, tokens, reported, asked))


def _many_logprobs(logits: torch.Tensor, edited: torch.Tensor | None, tokens: torch.Tensor, reported: ReportedLogprobs,
                   asked: Asked) -> LogprobRows:
    """Compute log-probabilities of more tokens than the C code reports, from raw or processed logits as the request
    asks."""
    num = asked.needs.max_logprobs
    assert num is not None
    shown = logits
    if asked.logprobs == "processed":
        shown = shape_logits(logits if edited is None else edited, asked)
    return many_logprob_rows(shown, tokens, shown.shape[1] if num == MAX_LOGPROBS_ALL else num, reported)


# The packed rows of each SamplingRows, with the counts and masks that they point to: these are allocated later, when a
# request first asks for them.
_rows: WeakKeyDictionary[SamplingRows, tuple[torch.Tensor | None, torch.Tensor | None, bytes]] = WeakKeyDictionary()


def _packed(rows: SamplingRows) -> bytes:
    """Return the parameters of the rows in the layout that the C code reads. They are packed once, and again when
    counts or masks are allocated."""
    counts, masks = rows.counts.packed, rows.masks.words
    known = _rows.get(rows)
    if known is None or known[0] is not counts or known[1] is not masks:
        known = _rows[rows] = counts, masks, _pack(rows, counts, masks)
    return known[2]


def _pack(rows: SamplingRows, counts: torch.Tensor | None, masks: torch.Tensor | None) -> bytes:
    tensors = {name: getattr(rows, name) for name in _FIELDS}
    assert all(tensor.stride(-1) == 1 for tensor in tensors.values()), "fields of rows are contiguous"
    tensors |= {"lists": rows.lists.ints, "allowed": rows.lists.allowed}
    tensors |= {} if counts is None else {"counts": counts}
    tensors |= {} if masks is None else {"masks": masks}
    return pack_rows(
        tensors, rows=rows.temperature.shape[0], stop_stride=rows.stop_ids.stride(0),
        allowed_stride=rows.lists.allowed.stride(0), count_stride=0 if counts is None else counts.stride(0),
        mask_stride=rows.lists.allowed.shape[1], masks_per_row=1 if masks is None else masks.shape[1],
    )
