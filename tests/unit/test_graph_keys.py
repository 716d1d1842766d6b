"""Which captured step serves a batch. A key must leave room for everything the batch has, drafts above all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from outrider.core import Limits, ScheduledBatch
from outrider.params import SamplingParams
from outrider.runner.graphs import StepGraphs, empty_shape, request_ladder
from outrider.runner.inputs import pack_host

LIMITS = Limits(max_requests=64, max_batched_tokens=512, max_len=128, max_drafts=3, vocab_size=100)


def batch_of(num_drafts: list[int], num_known: int = 1, **params: Any) -> ScheduledBatch:
    count = len(num_drafts)
    rows = list(range(1, count + 1))
    return ScheduledBatch(0, list(range(count)), [0] * count, rows, [num_known] * count, num_drafts,
                          [True] * count, [50] * count, [SamplingParams(temperature=0, **params)] * count)  # fmt: skip


def graphs() -> StepGraphs:
    return StepGraphs(SimpleNamespace(drafter=None), LIMITS)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_drafts", [[0], [3], [0] * 9, [3, 1] + [0] * 7, [3] * 9, [1] * 64, [0] * 63 + [2]])
def test_a_batch_fits_its_graph(num_drafts: list[int]) -> None:
    """Nine requests with four drafts among them are thirteen tokens: they fit sixteen padded requests of one token
    each, and still need room for three drafts a request."""
    made, batch = graphs(), batch_of(num_drafts)
    key = made.key_for(batch)
    assert key is not None and key.requests >= len(num_drafts) and key.tokens >= batch.num_tokens
    size = made.padded_size(key)
    assert size.drafts is not None and size.drafts >= max(num_drafts)
    shape, ints = pack_host(batch, size)
    captured = empty_shape(key, size.drafts, LIMITS.max_len)
    assert len(ints) == shape.num_ints == captured.num_ints
    assert (shape.requests, shape.tokens, shape.logit_rows, shape.most_drafts) == (
        captured.requests, captured.tokens, captured.logit_rows, captured.most_drafts)  # fmt: skip


@pytest.mark.parametrize("batch", [
    batch_of([0, 0], num_known=2), batch_of([0], logprobs=1), batch_of([0], min_tokens=2),
    batch_of([0], logit_bias={3: 1.0}),
    batch_of([0] * 65),
], ids=["a prompt", "logprobs", "min_tokens", "logit_bias", "too many"])  # fmt: skip
def test_what_no_graph_serves_runs_eagerly(batch: ScheduledBatch) -> None:
    assert graphs().key_for(batch) is None


def test_the_ladder_ends_at_the_most_requests() -> None:
    for most in (1, 3, 8, 64, 200, 256):
        ladder = request_ladder(most)
        assert ladder[-1] == most and ladder == sorted(set(ladder))
