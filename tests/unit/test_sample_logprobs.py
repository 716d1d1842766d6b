"""Log-probabilities against a naive computation: values, ranks, ties, raw and processed, and their form on the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core import TokenLogprobs
from outrider.core.params import SamplingParams
from outrider.sample import logprob_rows, to_host
from outrider.sample.logprobs import LogprobRows
from tests.unit.test_sample_reference import VOCAB, Case, cases, make_batch, naive_edits, naive_filters


def naive_logprobs(logits: np.ndarray, chosen: int, num: int) -> tuple[list[int], list[float], int]:
    shifted = logits.astype(np.float64) - logits.max()
    values = shifted - np.log(np.exp(shifted).sum())
    order = sorted(range(len(logits)), key=lambda t: (-logits[t], t))
    ids = [chosen, *(order if num == -1 else order[:num])]
    return ids, [float(values[t]) for t in ids], 1 + int((logits > logits[chosen]).sum())


def check(found: TokenLogprobs, expected: tuple[list[int], list[float], int]) -> None:
    assert list(found.token_ids) == expected[0] and found.rank == expected[2]
    assert list(found.logprobs) == pytest.approx(expected[1], abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(seed=st.integers(0, 2**32), num=st.sampled_from([0, 1, 4, VOCAB - 1, VOCAB, 50, -1]), ties=st.booleans())
@settings(max_examples=60)
def test_rows_agree_with_the_naive_ones(dtype: torch.dtype, seed: int, num: int, ties: bool) -> None:
    random = np.random.default_rng(seed)
    logits = random.normal(0, 3, (4, VOCAB))
    logits = np.round(logits / 2) if ties else logits
    logits[0, random.integers(0, VOCAB, 3)] = -np.inf
    tensor = torch.from_numpy(logits).to(dtype)
    chosen = random.integers(0, VOCAB, 4)
    found = logprob_rows(tensor, torch.from_numpy(chosen), num)
    assert found.top.dtype == dtype
    rows = to_host(found, 0, 4, num)
    for i, row in enumerate(rows):
        check(row, naive_logprobs(tensor[i].numpy(), int(chosen[i]), num))


@given(cases(np.float64), st.sampled_from(["raw", "processed"]))
@settings(max_examples=60)
def test_the_sampler_reports_raw_or_processed_logits(drawn: list[Case], mode: str) -> None:
    found = make_batch(drawn).sample(logprobs=mode)
    at = 0
    for case in drawn:
        num, end = case.params.logprobs, at + len(case.logits)
        if num is not None:
            assert found.logprobs is not None
            rows = to_host(found.logprobs, at, end, num)
            for j, row in enumerate(rows):
                if not found.bad[at + j]:
                    logits = case.logits[j]
                    if mode == "processed":
                        logits = naive_filters(case.params, naive_edits(case, j))
                    check(row, naive_logprobs(logits, int(found.tokens[at + j]), num))
        at = end
    if all(case.params.logprobs is None for case in drawn):
        assert found.logprobs is None


def test_a_request_is_shown_no_more_than_it_asked_for() -> None:
    logits = np.arange(VOCAB, dtype=np.float32)[None]
    drawn = [
        Case(SamplingParams(temperature=0, logprobs=n), (1,), 1, (), logits) for n in (0, 2)
    ]
    rows = make_batch(drawn).sample().logprobs
    assert rows is not None
    assert to_host(rows, 0, 1, 0)[0].token_ids == (12,)
    assert to_host(rows, 1, 2, 2)[0].token_ids == (12, 12, 11)
    assert to_host(rows, 0, 0, 2) == []


def test_parts_join_to_the_whole_and_move_as_one() -> None:
    logits, chosen = torch.randn(5, VOCAB), torch.arange(5)
    whole = logprob_rows(logits, chosen, 3)
    parts = [logprob_rows(logits[at], chosen[at], 3) for at in (slice(0, 2), slice(2, 5))]
    assert to_host(LogprobRows.join(parts).to("cpu"), 0, 5, 3) == to_host(whole, 0, 5, 3)
