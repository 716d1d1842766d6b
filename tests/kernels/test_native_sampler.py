"""The sampler's C code gives the tokens of the torch code: every parameter, shapes of logits, ties, threads, mates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core import Limits
from outrider.core.params import SamplingParams
from outrider.core.structured import StructuredOutputsParams
from outrider.kernels import cpu as native
from outrider.kernels import ops, reference
from outrider.kernels.cpu.sampling import count_runs
from outrider.kernels.sampling_keys import CountTable
from outrider.sample import Sampled, StepExtras, sampler
from outrider.sample.draw import choose_scaled, draw_tokens
from outrider.sample.filters import probability_mass
from outrider.sample.logprobs import LogprobRows, logprob_rows, report_tokens
from tests.unit.test_sample_reference import Batch, Case, cases, make_batch

pytestmark = pytest.mark.skipif(not native.available(), reason="needs the native kernels")
VOCAB = 9001  # three blocks, the last group not full
MODES = ["raw", "processed"]


def limits_of(vocab: int, max_list_ints: int = 1 << 16) -> Limits:
    return Limits(max_requests=16, max_batched_tokens=64, max_len=24, max_drafts=4, vocab_size=vocab, max_stop_ids=5,
                  max_list_ints=max_list_ints)


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def sampled_by(kind: str, batch: Batch, **options: Any) -> Sampled:
    with ops.using(kind, sampler.sample_chunk, draw_tokens, choose_scaled, report_tokens):
        return batch.sample(**options)


def assert_alike(batch: Batch, drawn: list[Case], **options: Any) -> Sampled:
    """The C code equals the torch code. Lists are read from the rows alone."""
    wanted = sampled_by("torch", batch, **options)
    is_served = sampler.kernels_serve(batch.needs)
    made = sampled_by("native", replace(batch, extras=StepExtras()) if is_served else batch, **options)
    assert made.tokens.tolist() == wanted.tokens.tolist()
    assert made.bad.tolist() == wanted.bad.tolist()
    assert (made.logprobs is None) == (wanted.logprobs is None)
    if made.logprobs is not None and wanted.logprobs is not None:
        asked = [case.params.logprobs for case in drawn for _ in case.logits]
        for at, num in enumerate(asked):
            if num is not None and not wanted.bad[at]:
                top = slice(0, None if num == -1 else num)
                assert made.logprobs.rank[at] == wanted.logprobs.rank[at]
                assert made.logprobs.top_ids[at, top].tolist() == wanted.logprobs.top_ids[at, top].tolist()
                for ours, exact in ((made.logprobs.chosen[at], wanted.logprobs.chosen[at]),
                                    (made.logprobs.top[at, top], wanted.logprobs.top[at, top])):
                    torch.testing.assert_close(ours, exact, atol=1e-5, rtol=1e-6)
    return made


SHAPES = {
    "flat": lambda r, size: r.normal(0, 0.6, size),
    "narrow": lambda r, size: r.normal(0, 0.004, size),
    "very narrow": lambda r, size: r.normal(0, 2e-5, size),
    "narrow but one": lambda r, size: np.where(np.arange(size[1]) == 0, -90.0, r.normal(5, 0.002, size)),
    "peaked": lambda r, size: np.where(np.arange(size[1]) < 20, r.normal(14, 2, size), r.normal(0, 2, size)),
    "ties": lambda r, size: np.round(r.normal(0, 2, size)),
    "equal": lambda r, size: np.full(size, 3.25),
    "zeros": lambda r, size: np.where(r.random(size) < 0.5, 0.0, -0.0),
    "far": lambda r, size: -np.exp(r.normal(3, 2, size)),
    "few": lambda r, size: np.where(r.random(size) < 0.01, r.normal(0, 1, size), -np.inf),
    "last": lambda r, size: np.where(np.indices(size)[1] == size[1] - 1, -2.5, -np.inf),
    "one NaN": lambda r, size: np.where(np.arange(size[1]) == size[1] // 2, np.nan, r.normal(0, 1, size)),
    "one inf": lambda r, size: np.where(np.arange(size[1]) == size[1] - 1, np.inf, r.normal(0, 1, size)),
    "all -inf": lambda r, size: np.full(size, -np.inf),
}
FIELDS: dict[str, list[Any]] = {
    "temperature": [0.0, 1e-40, 0.31, 1.0, 4.0], "top_k": [0, 1, 2, 50, 200, 100_000], "min_p": [0.0, 0.02, 1.0],
    "top_p": [1.0, 1e-9, 0.3, 0.9, 0.999], "repetition_penalty": [1.0, 0.6, 1.4], "presence_penalty": [0.0, -1.5, 0.7],
    "frequency_penalty": [0.0, -0.3, 1.1], "min_tokens": [0, 9], "logprobs": [None, None, 0, 5, 100, -1],
}


@st.composite
def wide_case(draw: st.DrawFn, vocab: int) -> Case:
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    fields = {name: draw(st.sampled_from(values)) for name, values in FIELDS.items()}
    token = st.integers(0, vocab - 1)
    lists: dict[str, Any] = {
        "logit_bias": {int(t): float(random.normal(0, 5)) for t in random.integers(0, vocab, 40)},
        "allowed_token_ids": random.permutation(vocab)[: max(1, vocab // 3)].tolist(),
        "bad_words_token_ids": ((draw(token),), (1, draw(token)), (2, 1, draw(token))),
        "stop_token_ids": [draw(token)],
    }
    fields |= {name: value for name, value in lists.items() if draw(st.integers(0, 2)) == 0}
    num_drafts, shape = draw(st.integers(0, 4)), draw(st.sampled_from(list(SHAPES)))
    allowed = None
    if draw(st.integers(0, 3)) == 0:
        fields["structured_outputs"] = StructuredOutputsParams(json_object=True)
        allowed = random.random((num_drafts + 1, vocab)) < draw(st.sampled_from([0.02, 0.5]))
    alphabet = random.integers(0, vocab, draw(st.sampled_from([3, 40])))
    alphabet[:2] = 1 % vocab, 2 % vocab
    return Case(
        SamplingParams(max_tokens=None, **fields), tuple(random.choice(alphabet, 8).tolist()), 4,
        tuple(random.choice(alphabet, num_drafts).tolist()),
        SHAPES[shape](random, (num_drafts + 1, vocab)).astype(np.float32), allowed=allowed,
        seed=draw(st.integers(-(2**63) + 1, 2**63 - 1)), sample_index=draw(st.integers(0, 3)), eos_ids=(vocab // 2,),
    )


def wide_batches(vocabs: list[int]) -> st.SearchStrategy[list[Case]]:
    return st.sampled_from(vocabs).flatmap(lambda vocab: st.lists(wide_case(vocab), min_size=1, max_size=4))


@given(cases(np.float32), st.sampled_from(MODES))
@settings(max_examples=10, deadline=None)
def test_any_batch_gives_what_the_torch_code_gives(drawn: list[Case], mode: str) -> None:
    assert_alike(make_batch(drawn), drawn, logprobs=mode)


@given(wide_batches([3, 64, 257, 4096, VOCAB]), st.sampled_from(MODES))
@settings(max_examples=20, deadline=None)
def test_any_vocabulary_gives_what_the_torch_code_gives(drawn: list[Case], mode: str) -> None:
    assert_alike(make_batch(drawn, limits=limits_of(drawn[0].logits.shape[1])), drawn, logprobs=mode)


@pytest.mark.long
@given(wide_batches([1, 2, 31, 64, 65, 1000, 4095, 4097, 32000, 49152]), st.sampled_from(MODES))
@settings(max_examples=1000, deadline=None)
def test_any_vocabulary_gives_what_the_torch_code_gives_at_length(drawn: list[Case], mode: str) -> None:
    assert_alike(make_batch(drawn, limits=limits_of(drawn[0].logits.shape[1])), drawn, logprobs=mode)


FILTERS = [{"top_k": 1}, {"top_k": 2, "top_p": 0.9}, {"top_k": 7, "top_p": 0.3}, {"top_k": 900, "top_p": 0.97},
           {"top_k": VOCAB}, {"top_p": 0.5}, {"top_p": 0.999, "min_p": 1e-3}, {"top_p": 1e-9},
           {"top_k": 60, "min_p": 0.5}, {"min_p": 0.01}, {}]


@pytest.mark.parametrize("shape", list(SHAPES))
def test_filters_keep_what_a_sort_keeps(shape: str, threads: int) -> None:
    """Processed log-probabilities are those of kept tokens, so all of them show which tokens are kept."""
    random = np.random.default_rng(len(shape))
    drawn = [Case(SamplingParams(temperature=[1.0, 0.31, 4.0][i % 3], logprobs=100, **fields), (1,), 1, (),
                  SHAPES[shape](random, (1, VOCAB)).astype(np.float32), seed=i) for i, fields in enumerate(FILTERS)]
    assert_alike(make_batch(drawn, limits=limits_of(VOCAB)), drawn, logprobs="processed")


def test_rows_at_the_limit_are_weighed_exactly() -> None:
    """The likelier half of the tokens weighs what top-p asks for, but for the last bits."""
    logits = np.where(np.arange(VOCAB) % 2 == 0, 0.0, -0.5).astype(np.float32)[None]
    mass = probability_mass(torch.from_numpy(logits))[0]
    limit = float(mass[::2].sum() / mass.sum())
    drawn = [Case(SamplingParams(top_p=limit + sign * 1.5e-7), (1,), 1, (), logits, seed=i)
             for i in range(6) for sign in (-1, 1)]
    made = assert_alike(make_batch(drawn, limits=limits_of(VOCAB)), drawn)
    assert {int(token) % 2 for token in made.tokens[::2]} == {0}, "the less likely half is left out by one of two"
    assert {int(token) % 2 for token in made.tokens[1::2]} == {0, 1}


EVERY: list[dict[str, Any]] = [
    {"top_k": 40}, {"top_p": 0.9}, {}, {"temperature": 0.0}, {"temperature": 0.0, "logprobs": 4}, {"logprobs": 4},
    {"repetition_penalty": 1.7, "frequency_penalty": 0.3}, {"logit_bias": {5: 8.0, 8999: 7.5}}, {"min_p": 0.02},
    {"temperature": 0.8, "top_k": 400, "top_p": 0.9, "min_p": 1e-4, "presence_penalty": 0.5, "min_tokens": 9,
     "logprobs": 4, "bad_words_token_ids": ((4,), (1, 6)), "allowed_token_ids": list(range(0, VOCAB, 2))},
]


def some_cases(seed: int = 0) -> list[Case]:
    random = np.random.default_rng(seed)
    return [
        Case(SamplingParams(**({"max_tokens": None} | fields)), tuple(random.integers(0, 12, 8).tolist()), 4,
             drafts := tuple(random.integers(0, 12, i % 3).tolist()),
             (1e-3 * np.round(random.normal(0, 3, (len(drafts) + 1, VOCAB)))).astype(np.float32), seed=i - 3,
             sample_index=i % 2, eos_ids=(7,))
        for i, fields in enumerate(EVERY)
    ]


def outcome(made: Sampled, rows: slice, num: int | None) -> list[object]:
    plain: list[object] = [made.tokens[rows].tolist(), made.bad[rows].tolist()]
    if num is None or made.logprobs is None:
        return plain
    found = made.logprobs
    return plain + [field[rows].tolist() for field in (found.rank, found.chosen, found.top_ids[:, :num],
                                                       found.top[:, :num])]


def test_bits_do_not_depend_on_mates_nor_threads(threads: int) -> None:
    """Scores that differ by rounding only: how a score is worked out decides. One mate asks for so many
    log-probabilities, and another has so long a list, that the torch code does a part."""
    drawn, one_list = some_cases(), Case(SamplingParams(logit_bias={t: 9.0 for t in range(60)}, max_tokens=None),
                                         (1, 2), 1, (), np.zeros((1, VOCAB), np.float32))
    loud = replace(one_list, params=SamplingParams(logprobs=-1, max_tokens=None))
    alone = [make_batch([case], limits=limits_of(VOCAB)).sample() for case in drawn]
    for mates, room in (([], 1 << 16), ([loud], 1 << 16), ([one_list], 64)):
        batch = make_batch([*drawn, *mates], 1, limits=limits_of(VOCAB, room))
        assert bool(batch.rows.lists.unplaced) == (room == 64)
        together, at = batch.sample(), 0
        for case, own in zip(drawn, alone, strict=True):
            count = len(case.logits)
            beside = outcome(together, slice(at, at + count), case.params.logprobs)
            assert beside == outcome(own, slice(0, count), case.params.logprobs), case.params
            at += count


def same_bits(rows: LogprobRows, others: LogprobRows) -> bool:
    return torch.equal(rows.ids, others.ids) and torch.equal(rows.values.view(torch.int32),
                                                             others.values.view(torch.int32))


@pytest.mark.parametrize("vocab", [1, 63, 4096, VOCAB])
@pytest.mark.parametrize("num", [0, 5, 128, 200, -1])
def test_given_tokens_have_the_log_probabilities_of_sampled_ones(vocab: int, num: int, threads: int) -> None:
    """Bit for bit, however the logit rows lie in memory and however many come together."""
    random = np.random.default_rng(vocab)
    drawn = [Case(SamplingParams(logprobs=num, temperature=[0.0, 0.7][i % 2]), (1,), 1, (),
                  make(random, (1, vocab)).astype(np.float32), seed=i)
             for i, make in enumerate([*SHAPES.values()] * 2)]
    batch = make_batch(drawn, limits=replace(limits_of(vocab), max_requests=len(drawn)))
    made = batch.sample()
    good = ~made.bad
    assert made.logprobs is not None and bool(good.any()) and bool(made.bad.any())
    wanted = made.logprobs.map(lambda field: field[good])
    logits, tokens = batch.logits[good], made.tokens[good]
    apart = torch.full((len(logits), vocab + 3), 77.0)[:, 1 : vocab + 1].copy_(logits)
    for own in (logits, apart):
        assert same_bits(logprob_rows(own, tokens, num), wanted)
        alone = [logprob_rows(own[i : i + 1], tokens[i : i + 1], num) for i in range(len(own))]
        assert same_bits(LogprobRows.join(alone), wanted)


def test_a_token_beside_a_nan_has_no_log_probability() -> None:
    logits = torch.randn(5, VOCAB)
    logits[0, 3], logits[1, 7000], logits[2] = torch.nan, torch.inf, -torch.inf
    with ops.using("reference", report_tokens):
        wanted = logprob_rows(logits, torch.arange(5), 2)
    found = logprob_rows(logits, torch.arange(5), 2)
    for rows in (found, wanted):
        assert rows.values.isnan().all(dim=1).tolist() == [True, True, True, False, False]
    assert bool(((found.ids >= 0) & (found.ids < VOCAB)).all())
    with pytest.raises(IndexError, match="sample_rows: a token is out of range"):
        logprob_rows(logits, torch.full((5,), VOCAB), 2)


def test_runs_are_counted() -> None:
    counts = torch.randint(0, 9, (5, 40), dtype=torch.int32)
    row, run_len = torch.tensor([3, 1, 0, 4]), torch.tensor([3, 1, 0, 2])
    run = torch.tensor([[7, 7, 39], [5, 6, 7], [1, 1, 1], [0, 2, 4]])
    wanted, made = counts.clone(), counts.clone()
    reference.count_runs(row, run, run_len, _table(wanted))
    count_runs(row, run, run_len, _table(made))
    assert torch.equal(made, wanted) and made[3, 7] == counts[3, 7] + 2
    count_runs(row, run, run_len, CountTable(None, torch.zeros(1, dtype=torch.int64), 40))
    with pytest.raises(IndexError, match="count_runs: a row or a token"):
        count_runs(row, run + 40, run_len, _table(made))


def _table(counts: torch.Tensor) -> CountTable:
    return CountTable(counts, torch.tensor([counts.data_ptr()]), counts.shape[1])


def test_a_row_that_is_not_there_is_named() -> None:
    batch = make_batch(some_cases()[2:3], limits=limits_of(VOCAB))
    far = replace(batch.logit_rows, row=batch.logit_rows.row + 90)
    with pytest.raises(IndexError, match="sample_rows: a row is out of range"):
        replace(batch, logit_rows=far).sample()


def test_a_step_may_have_no_logit_rows() -> None:
    """In a new thread, which has no scratch of an earlier call."""
    batch = make_batch(some_cases()[:1], limits=limits_of(VOCAB))
    at = batch.logit_rows
    none = replace(at, request=at.request[:0], row=at.row[:0], draft_index=at.draft_index[:0], position=at.position[:0])
    found: list[Sampled] = []
    thread = Thread(target=lambda: found.append(replace(batch, logits=batch.logits[:0], logit_rows=none).sample()))
    thread.start()
    thread.join()
    assert len(found) == 1 and found[0].tokens.shape == found[0].bad.shape == (0,)
