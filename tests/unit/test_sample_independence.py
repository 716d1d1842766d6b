"""What a logit row yields does not depend on batch mates, order, row, chunking, or how its history came about."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core import Limits
from outrider.core.params import SamplingParams
from outrider.sample import Sampled
from tests.unit.test_sample_reference import VOCAB, Case, cases, make_batch

MODES = ["raw", "processed"]


def outcome(found: Sampled, start: int, stop: int, num_logprobs: int | None) -> list[object]:
    """All that logit rows start to stop yield, to be compared bit for bit; NaNs are left out, they equal nothing."""
    plain: list[object] = [found.tokens[start:stop].tolist(), found.bad[start:stop].tolist()]
    if num_logprobs is None:
        return plain
    rows = found.logprobs
    assert rows is not None
    num = VOCAB if num_logprobs == -1 else num_logprobs
    good = ~found.bad[start:stop]
    exact = (rows.chosen, rows.rank, rows.top_ids[:, :num], rows.top[:, :num])
    return plain + [field[start:stop][good].tolist() for field in exact]


def outcomes(drawn: list[Case], mode: str, row_seed: int = 0, **options: object) -> list[list[object]]:
    """Per case."""
    found = make_batch(drawn, row_seed).sample(logprobs=mode, **options)
    starts = np.cumsum([0, *(len(case.logits) for case in drawn)])
    return [
        outcome(found, starts[i], starts[i + 1], case.params.logprobs) for i, case in enumerate(drawn)
    ]


@given(cases(np.float32), st.sampled_from(MODES), st.randoms(use_true_random=False))
@settings(max_examples=40)
def test_batch_mates_order_and_rows_do_not_matter(drawn: list[Case], mode: str, random: object) -> None:
    together = outcomes(drawn, mode)
    order = list(range(len(drawn)))
    random.shuffle(order)  # type: ignore[attr-defined]
    shuffled = outcomes([drawn[i] for i in order], mode, row_seed=1)
    assert [shuffled[order.index(i)] for i in range(len(drawn))] == together
    assert [outcomes([case], mode, row_seed=2)[0] for case in drawn] == together


@given(cases(np.float32), st.sampled_from(MODES), st.integers(1, 4))
@settings(max_examples=40)
def test_chunks_do_not_matter(drawn: list[Case], mode: str, height: int) -> None:
    assert outcomes(drawn, mode, chunk_elements=height * VOCAB) == outcomes(drawn, mode)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_logit_row_after_j_drafts_is_the_single_row_after_j_more_known_tokens(dtype: type) -> None:
    @given(cases(dtype, max_size=3), st.sampled_from(MODES))
    @settings(max_examples=50)
    def check(drawn: list[Case], mode: str) -> None:
        found = make_batch(drawn).sample(logprobs=mode)
        at = 0
        for case in drawn:
            for j in range(len(case.logits)):
                alone = outcomes([case.after(j)], mode, row_seed=j)[0]
                assert outcome(found, at, at + 1, case.params.logprobs) == alone
                at += 1

    check()


def test_many_rows_in_one_chunk_equal_the_same_rows_one_by_one() -> None:
    """A vocabulary that is no multiple of anything, so that vector lanes straddle logit rows."""
    vocab, limits = 4099, Limits(max_requests=7, max_batched_tokens=64, max_len=8, max_drafts=0, vocab_size=4099)
    random = np.random.default_rng(3)
    params = SamplingParams(temperature=0.9, top_p=0.95, min_p=1e-4, logprobs=5)
    drawn = [
        Case(params, (1, 2), 1, (), random.normal(0, 2, (1, vocab)).astype(np.float32), seed=i, max_len=8)
        for i in range(7)
    ]
    batch = make_batch(drawn, limits=limits)
    together, apart = batch.sample(), batch.sample(chunk_elements=1)
    assert torch.equal(together.tokens, apart.tokens)
    assert together.logprobs is not None and apart.logprobs is not None
    for name in ("chosen", "rank", "top_ids", "top"):
        assert torch.equal(getattr(together.logprobs, name), getattr(apart.logprobs, name)), name
