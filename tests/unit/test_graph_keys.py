"""Which captured step serves a batch. A key must leave room for everything the batch has, drafts above all."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.core import Admission, CheckpointWrite, Limits, ScheduledBatch
from outrider.core.params import SamplingParams
from outrider.runner.batch import PaddedSize, pack_host
from outrider.runner.graphs.keys import GraphKeys, empty_batch, empty_shape, request_ladder, start_ladder
from outrider.runner.results import read_result
from outrider.runner.rows import RowParams
from outrider.runner.step import DeviceResult

LIMITS = Limits(max_requests=64, max_batched_tokens=512, max_len=128, max_drafts=3, vocab_size=100)


def batch_of(num_drafts: list[int], num_known: int = 1) -> ScheduledBatch:
    count = len(num_drafts)
    rows = list(range(1, count + 1))
    return ScheduledBatch(0, list(range(count)), [0] * count, rows, [num_known] * count, num_drafts,
                          [True] * count, [50] * count)  # fmt: skip


def row_params(**params: Any) -> RowParams:
    """Of all rows; of a request that wants nothing special first."""
    made = RowParams()
    for asked in (SamplingParams(temperature=0), SamplingParams(temperature=0, **params)):
        made.admit([Admission(row, [1], 1, 0, 9, (), asked, 0, 0) for row in range(1, 70)])
    return made


PLAIN = row_params()


def graphs(*, is_settled: bool = True, is_costly: bool = True, takes_prompts: bool = True) -> GraphKeys:
    drafter = SimpleNamespace(is_settled=is_settled, attention_layers=(None,) if is_costly else ())
    return GraphKeys(LIMITS, drafter, takes_prompts=takes_prompts)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_drafts", [[0], [3], [0] * 9, [3, 1] + [0] * 7, [3] * 9, [1] * 64, [0] * 63 + [2]])
def test_a_batch_fits_its_graph(num_drafts: list[int]) -> None:
    """Nine requests with four drafts among them are thirteen tokens: they fit sixteen padded requests of one token
    each, and still need room for three drafts a request."""
    made, batch = graphs(), batch_of(num_drafts)
    key = made.key_for(batch, PLAIN)
    assert key is not None and key.requests >= len(num_drafts) and key.tokens >= batch.num_tokens
    size = made.padded_size(key)
    assert size.drafts is not None and size.drafts >= max(num_drafts)
    shape, ints = pack_host(batch, size)
    captured = empty_shape(key, size.drafts, LIMITS.max_len)
    assert len(ints) == shape.num_ints == captured.num_ints
    assert (shape.requests, shape.tokens, shape.logit_rows, shape.most_drafts) == (
        captured.requests, captured.tokens, captured.logit_rows, captured.most_drafts)  # fmt: skip


@pytest.mark.parametrize(("batch", "params"), [
    (batch_of([0]), row_params(logprobs=1)), (batch_of([0]), row_params(min_tokens=2)),
    (batch_of([0]), row_params(logit_bias={3: 1.0})), (batch_of([0] * 65), PLAIN),
    (batch_of([0], num_known=513), PLAIN),
], ids=["logprobs", "min_tokens", "logit_bias", "too many requests", "too many tokens"])  # fmt: skip
def test_what_no_graph_serves_runs_eagerly(batch: ScheduledBatch, params: RowParams) -> None:
    assert graphs().key_for(batch, params) is None


@pytest.mark.parametrize(("num_known", "num_drafts"), [
    (2, [0]), (60, [0] * 5), (7, [3, 0, 1]), (400, [0]), (8, [0] * 64),
])  # fmt: skip
def test_a_batch_with_prompts_fits_its_graph(num_known: int, num_drafts: list[int]) -> None:
    made, batch = graphs(), batch_of(num_drafts, num_known)
    key = made.key_for(batch, PLAIN)
    assert key is not None and key.has_prompts
    assert key.requests >= batch.num_requests and batch.num_tokens <= key.tokens <= batch.num_tokens * 9 // 8 + 64
    size = made.padded_size(key)
    shape, ints = pack_host(batch, size)
    captured = empty_shape(key, size.drafts or 0, LIMITS.max_len)
    assert len(ints) == shape.num_ints == captured.num_ints and captured.longest_short == 1 + (size.drafts or 0)
    assert captured.logit_rows >= sum(1 + n for n in num_drafts) and not captured.logit_rows_are_tokens


def test_prompts_that_no_graph_serves() -> None:
    prompt, decoding = batch_of([0], num_known=9), batch_of([0])
    assert graphs(takes_prompts=False).key_for(prompt, PLAIN) is None
    assert graphs(takes_prompts=False).key_for(decoding, PLAIN) is not None
    assert graphs(is_settled=False).key_for(decoding, PLAIN) is None


@pytest.mark.parametrize("is_costly", [False, True])
def test_few_graphs_serve_all_numbers_of_drafts_and_proposals(is_costly: bool) -> None:
    """And whatever a batch has or wants fits the graph captured at start-up that stands in for a new one."""
    made = graphs(is_costly=is_costly)
    at_start = set(made.decoding(takes_checkpoints=False))
    for requests in (1, 5, 40, 64):
        keys = set()
        for drafts, propose in itertools.product(range(4), range(4)):
            if not is_costly and propose not in (0, 3):
                continue  # it always proposes all it can
            batch = replace(batch_of([drafts] + [0] * (requests - 1)), propose=propose)
            key = made.key_for(batch, PLAIN)
            assert key is not None
            keys.add(key)
            serving = key if key in at_start else made.wider(key)
            if serving not in at_start:
                assert not drafts and propose and is_costly, "a first proposal after a pause"
                serving = key
            for one in (key, serving):
                assert one.tokens >= one.requests * (1 + drafts) and one.propose >= propose
            assert len(pack_host(batch, made.padded_size(serving))[1]) == made.shape(serving).num_ints
        assert len(keys) <= (7 if is_costly else 5)


def writes(*targets: tuple[int, int]) -> list[CheckpointWrite]:
    """(row, boundary) each."""
    return [CheckpointWrite(10 + i, row, boundary, [2 * i, 2 * i + 1]) for i, (row, boundary) in enumerate(targets)]


def test_checkpoints_are_integers_of_a_captured_batch() -> None:
    """One boundary per padded request, or -1, behind everything else; the graph has room for them."""
    made, batch = graphs(), replace(batch_of([1, 0, 2]), checkpoints=writes((3, 48), (1, 32)))
    key = made.key_for(batch, PLAIN)
    assert key is not None and key.has_targets and key != made.key_for(batch_of([1, 0, 2]), PLAIN)
    shape, ints = pack_host(batch, made.padded_size(key))
    captured = empty_shape(key, LIMITS.max_drafts, LIMITS.max_len)
    assert ints[-key.requests :] == [32, -1, 48] + [-1] * (key.requests - 3)
    assert ints[: -key.requests] == pack_host(batch, replace(made.padded_size(key), has_targets=False))[1]
    assert len(ints) == shape.num_ints == captured.num_ints == len(empty_batch(captured, torch.device("cpu")))
    assert empty_batch(captured, torch.device("cpu"))[-key.requests :].tolist() == [-1] * key.requests


def test_several_checkpoints_of_a_request_and_folds_run_eagerly() -> None:
    several = replace(batch_of([0, 0]), checkpoints=writes((1, 32), (2, 48), (1, 48)))
    assert graphs().key_for(several, PLAIN) is None
    assert graphs().key_for(replace(batch_of([0]), folds=writes((2, 16))), PLAIN) is None
    with pytest.raises(ValueError, match="several checkpoints"):
        pack_host(several, PaddedSize(2, 2, has_targets=True))


def test_what_was_written_by_request_is_reported_by_checkpoint() -> None:
    batch = replace(batch_of([0, 0, 0]), checkpoints=writes((3, 48), (1, 32)), folds=writes((9, 16)))
    counts, run = torch.zeros(4, 6, dtype=torch.int64), torch.zeros(4, 1, dtype=torch.int64)
    for flags, ids in (([1, 0, 0, 0, 0], [11]), ([0, 1, 1, 1, 0], [10]), ([1, 1, 1, 1, 1], [10, 11, 10])):
        result = DeviceResult(counts, run, None, None, torch.tensor(flags, dtype=torch.bool), by_request=True)
        assert read_result(batch, result, 0.0).checkpoints == ids


def test_the_ladder_ends_at_the_most_requests() -> None:
    for most in (1, 3, 8, 64, 200, 256):
        ladder, at_start = request_ladder(most), start_ladder(most)
        assert ladder[-1] == at_start[-1] == most
        assert all(sizes == sorted(set(sizes)) for sizes in (ladder, at_start))
        assert set(at_start) <= set(ladder), "no size is captured that no batch asks for"
