"""Hidden states of prompts, for the requests that ask: one vector of a step, its sum, or one for each token.

Requests whose result depends on every token take no prefix hits, so that every token passes through here once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.core import Finish, HiddenReport, RequestResult, ScheduledBatch
from outrider.models.base import Hidden
from outrider.runner.batch import EagerShape, Inputs
from outrider.runner.rows import RowParams

NOT_FINITE = "the model's hidden states are not finite: check the weights"


@dataclass(frozen=True)
class HiddenRows:
    """Vectors of the scheduled requests, in batch order."""

    vectors: torch.Tensor  # [vectors, hidden size] float32, float64 of a float64 model
    counts: list[int | None]  # vectors of each request; None for a request that generates tokens
    ends: list[bool]  # whether the step computes the last token of the request


def reported_hidden(scheduled: ScheduledBatch, inputs: Inputs, hidden: Hidden, params: RowParams, *,
                    exact: bool = False) -> HiddenRows | None:
    """exact: a sum is left to the host, which gets every token's vector, since sums of chunks would add in an order
    that depends on where the prompt was cut."""
    reports = params.hidden_of(scheduled.rows)
    if not reports:
        return None
    assert isinstance(inputs.shape, EagerShape), "captured steps report no hidden states"
    wide = torch.float64 if hidden.final.dtype == torch.float64 else torch.float32
    parts: list[torch.Tensor] = []
    counts: list[int | None] = []
    ends: list[bool] = []
    start = 0
    lens = inputs.shape.queries.lens
    for row, length, bound in zip(scheduled.rows, lens, scheduled.bounds, strict=False):
        report, end_len = reports.get(row, (HiddenReport.NONE, 0))
        own, is_last = hidden.final[start : start + length], bound >= end_len
        start += length
        ends.append(is_last)
        match report:
            case HiddenReport.NONE:
                counts.append(None)
                continue
            case HiddenReport.SUM if not exact:
                own = own.to(wide).sum(0, keepdim=True)
            case HiddenReport.LAST:
                own = own[-1:] if is_last else own[:0]
        parts.append(own.to(wide))
        counts.append(len(own))
    return HiddenRows(torch.cat(parts), counts, ends)


def with_hidden(requests: list[RequestResult], hidden: HiddenRows) -> list[RequestResult]:
    """The results with the hidden states that were asked for. A request for hidden states ends with its prompt."""
    vectors = hidden.vectors.cpu().float().numpy()
    first, done = 0, []
    for result, count, is_last in zip(requests, hidden.counts, hidden.ends, strict=True):
        if count is not None:
            own = vectors[first : first + count].copy()  # alone, a view would be pickled with all the others
            first += count
            finish, error = (Finish.STOP if is_last else Finish.NO), None
            if not bool(torch.from_numpy(own).isfinite().all()):
                finish, error = Finish.ERROR, NOT_FINITE
            result = result._replace(hidden=own, finish=finish, error=error)
        done.append(result)
    return done
