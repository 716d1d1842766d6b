"""Acceptance of drafts: how many drafts equal the sampled tokens, which tokens each request gains (its run), and
whether the run ends the request.

A request's drafts are accepted up to the first one that differs from the sampled token; nothing else is compared.
Shapes are fixed, [R, K + 1], where K is the most drafts that the host scheduled for any request; only the device knows
how many of them were live.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from outrider.core import Finish


class StopRules(Protocol):
    """The conditions that end each row's request; int64."""

    end_len: torch.Tensor  # [ROWS] known tokens at which it ends
    num_stop_ids: torch.Tensor  # [ROWS]
    stop_ids: torch.Tensor  # [ROWS, STOP_IDS]


@dataclass(frozen=True)
class Accepted:
    run: torch.Tensor  # [R, K + 1] int64; 0 beyond run_len
    run_len: torch.Tensor  # [R] int64: 0 where the request does not sample
    num_accepted: torch.Tensor  # [R] int64: drafts that are part of the run
    finish: torch.Tensor  # [R] int64: codes of Finish


def accept(
    sampled: torch.Tensor,
    bad: torch.Tensor,
    first_logit: torch.Tensor,
    drafts: torch.Tensor,
    num_drafts: torch.Tensor,
    samples: torch.Tensor,
    known: torch.Tensor,
    rules: StopRules,
    row: torch.Tensor,
) -> Accepted:
    """Accept drafts, and return each request's run (the tokens that it gains) and whether the run ends the request.
    sampled [L]: the token of each logit row; a request's logit rows begin at its first_logit [R]. drafts [R, K]. The
    others are [R]: the number of live drafts, whether the request samples (and is alive), its number of known tokens,
    and its row. bad [L]: logit rows in which the sampler found no token. A run stops before such a row, and the request
    ends with Finish.ERROR unless an earlier token of the run ended it."""
    num_requests, width = drafts.shape[0], drafts.shape[1] + 1
    assert len(num_drafts) == len(samples) == len(known) == len(row) == num_requests, "requests disagree"
    step = torch.arange(width, device=sampled.device)  # [K + 1]
    reached = samples[:, None] & (step <= num_drafts[:, None])
    chosen = _by_request(sampled, first_logit, reached)
    agrees = (drafts == chosen[:, :-1]) & (step[:-1] < num_drafts[:, None])
    accepted = agrees.to(torch.int64).cumprod(dim=1).sum(dim=1)

    # What lies beyond the accepted drafts never counts: the run is at most accepted + 1 long.
    room = (rules.end_len[row] - known).clamp(min=0)
    first_stop = _first(_is_stop(chosen, row, rules), step)
    first_bad = _first(_by_request(bad, first_logit, reached), step)
    run_len = torch.minimum(torch.minimum(accepted, first_stop) + 1, room)
    finish = torch.where(run_len >= room, int(Finish.LENGTH), int(Finish.NO))
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


def _by_request(values: torch.Tensor, first_logit: torch.Tensor, reached: torch.Tensor) -> torch.Tensor:
    """Rearrange values [L] of logit rows to [R, K + 1]: entry j of a request is the value of logit row first_logit + j,
    or 0 where `reached` is false."""
    if values.shape[0] == 0:
        return torch.zeros(reached.shape, dtype=values.dtype, device=values.device)
    index = first_logit[:, None] + torch.arange(reached.shape[1], device=values.device)
    return values[index.clamp_max(values.shape[0] - 1)].masked_fill(~reached, 0)


def _is_stop(tokens: torch.Tensor, row: torch.Tensor, rules: StopRules) -> torch.Tensor:
    """Return [R, K + 1] bool: whether each of these tokens is a stop id of its row."""
    ids = rules.stop_ids[row]
    is_id = torch.arange(ids.shape[1], device=row.device) < rules.num_stop_ids[row][:, None]
    return ((tokens[:, :, None] == ids[:, None, :]) & is_id[:, None, :]).any(dim=2)


def _first(found: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """Return [R]: the first index at which found [R, K + 1] is true; K + 1 if there is none."""
    return torch.where(found, step, step.shape[0]).amin(dim=1)
