"""The sampler on a GPU: a fixed sequence of kernel launches that serves all sampling parameters, which it reads from
row state.

It chooses exactly the tokens that the torch code of this folder chooses. A logit row without parameters gets the token
that `draw_tokens` would draw, so the token does not depend on the other requests of the batch. Importing this module
needs triton.
"""

from __future__ import annotations

import torch

from outrider.kernels.gpu.sampling.draw import plan_spans
from outrider.kernels.gpu.sampling.edits import EditRows, Text, edit_logits
from outrider.kernels.gpu.sampling.filtered_draw import FilterRows, draw_filtered
from outrider.kernels.gpu.sampling.logprobs import LogprobLogits, token_logprobs
from outrider.sample.logprobs import LogprobRows
from outrider.sample.sampler import Asked, Sampled
from outrider.sample.sampling_rows import SamplingRows


def sample_fused(logits: torch.Tensor, asked: Asked) -> Sampled:
    at, rows, needs, history = asked.logit_rows, asked.rows, asked.needs, asked.history
    tile_spans = plan_spans(logits)
    edited = edit_logits(logits, at.row, at.draft_index, at.position, _edit_rows(rows),
                         Text(history.tokens, history.known, history.drafts), tile_spans, any_edits=needs.any_edits,
                         num_counts=rows.counts.table.width)
    is_processed = needs.max_logprobs is not None and asked.logprobs == "processed"
    filter_rows = FilterRows(rows.flags, rows.temperature, rows.top_k, rows.top_p, rows.min_p_floor, rows.seed,
                             rows.sample_index, rows.num_logprobs)
    tokens, bad, thresholds = draw_filtered(logits, edited, at.row, at.position, filter_rows, tile_spans,
                                            any_searched=needs.any_top_k or needs.any_top_p, thresholds=is_processed)
    if needs.max_logprobs is None:
        return Sampled(tokens, bad, None)
    inputs = LogprobLogits(logits, edited, at.row, rows.num_logprobs, rows.flags, rows.temperature, thresholds,
                           tile_spans.greatest)
    found = token_logprobs(inputs, tokens, tile_spans, needs.max_logprobs, processed=is_processed)
    return Sampled(tokens, bad, LogprobRows(found.ids, found.values))


def _edit_rows(rows: SamplingRows) -> EditRows:
    return EditRows(
        rows.flags, rows.temperature, rows.presence, rows.frequency, rows.repetition, rows.min_tokens, rows.prompt_len,
        rows.num_stop_ids, rows.stop_ids, rows.bias_start, rows.bias_len, rows.words_start, rows.num_words,
        rows.lists.ints, rows.lists.allowed, rows.counts.table.address, rows.masks.words,
    )
