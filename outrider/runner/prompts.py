"""Log-probabilities of prompt tokens, for the requests that ask: one row per token computed that has a next one.

Such requests take no prefix hits, so that every prompt token passes through here once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.core import ScheduledBatch
from outrider.kernels.buffers import to_device
from outrider.models.base import Hidden, Model
from outrider.runner.batch import EagerShape, Inputs
from outrider.runner.rows import RowState
from outrider.sample.logprobs import LogprobRows, logprob_rows

CHUNK_ROWS = 256  # logit rows at a time: a long prompt times a large vocabulary would not fit


@dataclass(frozen=True)
class PromptLogprobs:
    rows: LogprobRows
    counts: list[int]  # rows per scheduled request, in batch order; the first is of the first token scheduled


def prompt_logprobs(model: Model, scheduled: ScheduledBatch, inputs: Inputs, hidden: Hidden, state: RowState, *,
                    row_by_row: bool = False) -> PromptLogprobs | None:
    """row_by_row: see `sample`."""
    params = state.params.of_rows(scheduled.rows)
    asked = [p.prompt_logprobs for p in params if p.prompt_logprobs is not None]
    if not asked:
        return None
    view = inputs.batch.unpadded
    assert isinstance(inputs.shape, EagerShape), "captured steps report no logprobs"
    counts = [n if p.prompt_logprobs is not None else 0
              for n, p in zip(scheduled.num_known, params, strict=True)]
    starts: list[int] = []
    start = 0
    for length, count in zip(inputs.shape.queries.lens, counts, strict=False):
        starts += range(start, start + count)
        start += length
    token_rows = to_device(starts, torch.int64, state.device)
    # Past the end of the known tokens there is no next token; such rows are cut on the host.
    next_position = (view.positions[token_rows] + 1).clamp_max(state.tokens.shape[1] - 1)
    chosen = state.tokens[view.rows[view.request_of[token_rows]], next_position]
    num = -1 if -1 in asked else max(asked)
    parts = []
    height = 1 if row_by_row else CHUNK_ROWS
    for first in range(0, len(starts), height):
        cut = slice(first, first + height)
        parts.append(logprob_rows(model.logits(hidden.final[token_rows[cut]]), chosen[cut], num))
    return PromptLogprobs(LogprobRows.join(parts), counts)
