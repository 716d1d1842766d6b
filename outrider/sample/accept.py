"""Acceptance: how many drafts equal what the sampler picked, the run that follows, and whether it ends the request.

A draft stands as long as it is the sampled token; nothing else is compared. Fixed shapes [R, K + 1], K the most
drafts the host scheduled for any request; how many were alive only the device knows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.core import Finish
from outrider.sample.batch import LogitRows
from outrider.sample.rows import SamplingRows


@dataclass(frozen=True)
class Accepted:
    run: torch.Tensor  # [R, K + 1] int64; 0 beyond run_len
    run_len: torch.Tensor  # [R] int64: 0 where the request does not sample
    num_accepted: torch.Tensor  # [R] int64: drafts that are part of the run
    finish: torch.Tensor  # [R] int64: codes of Finish


def accept(
    sampled: torch.Tensor,
    logit_rows: LogitRows,
    drafts: torch.Tensor,
    num_drafts: torch.Tensor,
    samples: torch.Tensor,
    known: torch.Tensor,
    rows: SamplingRows,
    row: torch.Tensor,
    *,
    bad: torch.Tensor | None = None,
) -> Accepted:
    """Of sampled [L], drafts [R, K], and per request [R] the live drafts, whether it samples (and is alive), its
    known tokens and its row. `bad` [L] are the logit rows the sampler found nothing in: the run stops before one
    and the request ends with Finish.ERROR, unless it ended earlier in the run."""
    num_requests, width = drafts.shape[0], drafts.shape[1] + 1
    assert len(num_drafts) == len(samples) == len(known) == len(row) == num_requests, "requests disagree"
    step = torch.arange(width, device=sampled.device)  # [K + 1]
    chosen = _by_request(sampled, logit_rows, num_requests, width)
    agrees = (drafts == chosen[:, :-1]) & (step[:-1] < num_drafts[:, None])
    accepted = agrees.to(torch.int64).cumprod(dim=1).sum(dim=1)

    # What lies beyond the accepted drafts never counts: the run is at most accepted + 1 long.
    room = (rows.end_len[row] - known).clamp(min=0)
    first_stop = _first(_is_stop(chosen, row, rows), step)
    run_len = torch.minimum(torch.minimum(accepted, first_stop) + 1, room)
    finish = torch.where(run_len >= room, int(Finish.LENGTH), int(Finish.NO))
    if bad is not None:
        first_bad = _first(_by_request(bad, logit_rows, num_requests, width), step)
        finish.masked_fill_(first_bad < run_len, int(Finish.ERROR))
        run_len = torch.minimum(run_len, first_bad)
    finish.masked_fill_(first_stop < run_len, int(Finish.STOP))

    run_len = run_len.masked_fill(~samples, 0)
    return Accepted(
        run=chosen.masked_fill(step >= run_len[:, None], 0),
        run_len=run_len,
        num_accepted=torch.minimum(accepted, (run_len - 1).clamp(min=0)),
        finish=finish.masked_fill(~samples, int(Finish.NO)),
    )


def _by_request(values: torch.Tensor, logit_rows: LogitRows, num_requests: int, width: int) -> torch.Tensor:
    """[R, K + 1] from [L]: logit row l goes to its request's place draft_index[l]. 0 where there is none.

    Padded logit rows name place K + 1 of the last request: a cell of its own, which is cut off."""
    grid = torch.zeros(num_requests * width + 1, dtype=values.dtype, device=values.device)
    cell = logit_rows.request * width + logit_rows.draft_index
    return grid.scatter_(0, cell, values)[:-1].view(num_requests, width)


def _is_stop(tokens: torch.Tensor, row: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """[R, K + 1] bool for tokens of the same shape."""
    hits = tokens[:, :, None] == rows.stop_ids[row][:, None, :]
    return (hits & rows.stop_mask(row)[:, None, :]).any(dim=2)


def _first(found: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """[R]: the first place where found [R, K + 1] holds, or K + 1."""
    return torch.where(found, step, step.shape[0]).amin(dim=1)
