"""The sampling stages that change single logits, in place: allowed tokens, bad words, min_tokens, logit bias,
penalties, masks.

Each stage gets the logits [L, V] of a chunk of logit rows as a copy that it may change, and changes a logit row only as
that row's request asks. A token is forbidden by adding -inf, so that several changes of one logit may come in any
order.
"""

from __future__ import annotations

import torch

from outrider.kernels.sampling_flags import MASKED, OUTPUTS
from outrider.sample.extras import AllowedTokens, BadWords, LogitBias, StepNeeds
from outrider.sample.sampling_batch import History, LogitRows
from outrider.sample.sampling_rows import SamplingRows


def allow_only(logits: torch.Tensor, allowed: AllowedTokens, logit_rows: LogitRows, rows: SamplingRows) -> None:
    words = rows.lists.allowed[logit_rows.row[allowed.logit_row]]
    own = logits.index_select(0, allowed.logit_row)
    own.masked_fill_(~_allowed_by(words, logits.shape[1]), -torch.inf)
    logits.index_copy_(0, allowed.logit_row, own)


def forbid_bad_words(logits: torch.Tensor, bad_words: BadWords, logit_rows: LogitRows, history: History) -> None:
    width = bad_words.before.shape[1]
    back = torch.arange(1, width + 1, device=logits.device)  # [P]
    for logit_row, entry in bad_words.rows.pairs(width):
        at = logit_rows.position[logit_row][:, None] - back  # [E, P]
        matches = (history.at(logit_rows.row[logit_row], at) == bad_words.before[entry]) & (at >= 0)
        complete = (matches | (back > bad_words.num_before[entry][:, None])).all(dim=1)
        _add_at(logits, logit_row, bad_words.last[entry], _forbid(complete, logits.dtype))


def forbid_early_stops(logits: torch.Tensor, logit_rows: LogitRows, rows: SamplingRows) -> None:
    """Forbid the stop ids at positions before the request's min_tokens."""
    row = logit_rows.row
    early = logit_rows.position - rows.prompt_len[row] < rows.min_tokens[row]
    forbidden = rows.stop_mask(row) & early[:, None]
    logits.scatter_add_(1, rows.stop_ids[row], _forbid(forbidden, logits.dtype))


def add_bias(logits: torch.Tensor, bias: LogitBias) -> None:
    value = bias.value.to(logits.dtype)
    for logit_row, entry in bias.rows.pairs():
        _add_at(logits, logit_row, bias.token[entry], value[entry])


def penalise(
    logits: torch.Tensor, logit_rows: LogitRows, rows: SamplingRows, history: History, needs: StepNeeds
) -> None:
    """Apply penalties. The repetition penalty counts tokens of the prompt and the outputs, the others tokens of the
    outputs. The row's counts cover its known tokens; the drafts before each logit row are added here."""
    row, packed = logit_rows.row, rows.counts.packed
    assert packed is not None, "a row with penalties was not admitted"

    def per_row(field: torch.Tensor) -> torch.Tensor:
        return field[row].to(logits.dtype)[:, None]

    own = packed.index_select(0, row)
    counts = own & OUTPUTS
    if history.drafts.shape[1] > 0:
        step = torch.arange(history.drafts.shape[1], device=row.device)
        is_before = step < logit_rows.draft_index[:, None]
        counts.scatter_add_(1, history.drafts.index_select(0, row), is_before.to(torch.int32))
    if needs.any_repetition:
        factor = torch.where((own != 0) | (counts > 0), per_row(rows.repetition), 1)
        logits.copy_(torch.where(logits > 0, logits / factor, logits * factor))
    if needs.any_output_counts:
        logits.sub_(counts * per_row(rows.frequency))
        logits.sub_((counts > 0) * per_row(rows.presence))


def allow_by_masks(logits: torch.Tensor, logit_rows: LogitRows, rows: SamplingRows) -> None:
    """Forbid, in place, the tokens that a feature's masks forbid. A row has a mask for each number of drafts before its
    logit row."""
    words = rows.masks.words
    assert words is not None, "a row with masks was not admitted"
    own = words[logit_rows.row, logit_rows.draft_index.clamp_max(words.shape[1] - 1)]  # [L, mask words]
    is_masked = (rows.flags[logit_rows.row] & MASKED) != 0
    logits.masked_fill_(is_masked[:, None] & ~_allowed_by(own, logits.shape[1]), -torch.inf)


def _allowed_by(words: torch.Tensor, vocab: int) -> torch.Tensor:
    """Unpack masks [n, mask words] that have a bit for each token. Returns [n, V] bool."""
    bits = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words[:, :, None] >> bits) & 1).flatten(1)[:, :vocab] != 0


def _forbid(where: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros_like(where, dtype=dtype).masked_fill_(where, -torch.inf)


def _add_at(logits: torch.Tensor, logit_row: torch.Tensor, token: torch.Tensor, value: torch.Tensor) -> None:
    logits.view(-1).scatter_add_(0, logit_row * logits.shape[1] + token, value)
