"""The sampler as kernels: everything that a request may ask for, read from row state, in a fixed sequence of launches.

The torch code of this folder is its specification, to the token. Logit rows whose rows ask for nothing are drawn as
`draw_tokens` draws them: their token does not depend on whether a mate asks for more.
"""

from __future__ import annotations

from types import ModuleType

import torch

from outrider.sample.batch import History, LogitRows
from outrider.sample.extras import StepNeeds
from outrider.sample.logprobs import LogprobRows
from outrider.sample.rows import SamplingRows

MAX_LOGPROBS = 128  # of the most likely tokens that the kernels find


def serves(rows: SamplingRows, needs: StepNeeds) -> bool:
    """Whether kernels can do all that a batch asks for: not the log-probabilities of a whole vocabulary, and not while
    some row's lists found no place."""
    asked = needs.max_logprobs
    return not rows.lists.unplaced and (asked is None or 0 <= asked <= MAX_LOGPROBS)


def sample_fused(
    kernels: ModuleType, logits: torch.Tensor, logit_rows: LogitRows, rows: SamplingRows, history: History,
    needs: StepNeeds, processed: bool,
) -> tuple[torch.Tensor, torch.Tensor, LogprobRows | None]:
    """(tokens, which are bad, log-probabilities); in logit rows that do not ask for the last they are not written."""
    row, position, spans = logit_rows.row, logit_rows.position, kernels.plan_spans(logits)
    edit_rows = kernels.EditRows(
        rows.flags, rows.temperature, rows.presence, rows.frequency, rows.repetition, rows.min_tokens, rows.prompt_len,
        rows.num_stop_ids, rows.stop_ids, rows.bias_start, rows.bias_len, rows.words_start, rows.num_words,
        rows.lists.ints, rows.lists.allowed, rows.counts.packed,
    )  # fmt: skip
    text = kernels.Text(history.tokens, history.known, history.drafts)
    edited = kernels.edit_logits(logits, row, logit_rows.draft_index, position, edit_rows, text, spans,
                                 any_edits=needs.any_edits)
    filter_rows = kernels.FilterRows(rows.flags, rows.temperature, rows.top_k, rows.top_p, rows.min_p_floor)
    if needs.any_filters:
        thresholds = kernels.find_thresholds(logits, edited, row, filter_rows, spans,
                                             any_searched=needs.any_top_k or needs.any_top_p)
    else:
        thresholds = torch.empty(len(logit_rows), dtype=torch.float32, device=logits.device)
    tokens, bad = kernels.draw_edited(logits, edited, row, position, kernels.Keys(*rows.keys), rows.flags, thresholds,
                                      spans)
    if needs.max_logprobs is None:
        return tokens, bad, None
    inputs = kernels.LogprobLogits(logits, edited, row, rows.num_logprobs, rows.flags, rows.temperature, thresholds,
                                   spans.greatest)
    found = kernels.token_logprobs(inputs, tokens, spans, needs.max_logprobs, processed=processed)
    return tokens, bad, LogprobRows(tokens, *found)
