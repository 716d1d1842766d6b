"""The sampler as kernels equals its torch code to the token: every parameter, thresholds, log-probabilities, mates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="needs the triton package")

import triton as compiler
import triton.language as tl

from outrider.core import Limits
from outrider.core.params import SamplingParams
from outrider.core.structured import StructuredOutputsParams
from outrider.kernels import ops, reference
from outrider.kernels.gpu.sampling import draw as sampling
from outrider.kernels.gpu.sampling import edits, filtered_draw, logprobs, masses, token_counts
from outrider.kernels.sampling_keys import CountTable
from outrider.sample import Sampled, SamplingRows, StepExtras, StepNeeds, fused, sampler
from outrider.sample.draw import choose_scaled, draw_tokens
from outrider.sample.filters import keep_likely, probability_mass, scale
from outrider.sample.logprobs import LogprobRows, logprob_rows, report_tokens
from tests.unit.test_sample_reference import Batch, Case, cases, make_batch

VOCAB = 1500  # two tiles, the second one not full
LIMITS = Limits(max_requests=10, max_batched_tokens=64, max_len=24, max_drafts=4, vocab_size=VOCAB, max_stop_ids=5)
MODES = ["raw", "processed"]
LOUD = SamplingParams(
    temperature=0.8, top_k=400, top_p=0.9, min_p=1e-4, presence_penalty=0.5, frequency_penalty=0.3, min_tokens=9,
    repetition_penalty=1.3, logit_bias={t: 0.01 * (t % 300) for t in range(3, VOCAB, 7)}, max_tokens=None,
    allowed_token_ids=list(range(0, VOCAB, 2)), stop_token_ids=[2, 1400], logprobs=4,
    bad_words_token_ids=((4,), (1, 6), (3, 1, 8), (1, 3, 10), *((t, t + 2) for t in range(0, 400, 2))),
)
ALONE: list[dict[str, Any]] = [
    {"top_k": 40}, {"top_k": 1}, {"top_p": 0.9}, {"top_p": 0.01}, {"top_k": 300, "top_p": 0.7}, {"min_p": 0.02},
    {"min_p": 0.1, "top_k": 1200, "top_p": 0.95}, {"frequency_penalty": 0.7}, {"presence_penalty": -1.0},
    {"repetition_penalty": 1.7}, {"logit_bias": {5: 8.0, 1499: 7.5}}, {"allowed_token_ids": [3, 1030, 1499]},
    {"bad_words_token_ids": ((7,), (1, 2, 1400))}, {"min_tokens": 3, "stop_token_ids": [0, 1024]}, {"logprobs": 3},
]


def sampled_by(kind: str, batch: Batch, **options: Any) -> Sampled:
    """With kernels, or with the torch code alone."""
    with ops.using(kind, sampler.sample_chunk, draw_tokens, choose_scaled, report_tokens):
        return batch.sample(**options)


def assert_equal(made: Sampled, wanted: Sampled, asked: list[int | None]) -> None:
    """asked: for each logit row how many log-probabilities."""
    assert made.tokens.tolist() == wanted.tokens.tolist() and made.bad.tolist() == wanted.bad.tolist()
    assert (made.logprobs is None) == (wanted.logprobs is None)
    if made.logprobs is None or wanted.logprobs is None:
        return
    for at, num in enumerate(asked):
        if num is not None and not wanted.bad[at]:
            assert made.logprobs.rank[at] == wanted.logprobs.rank[at]
            assert made.logprobs.top_ids[at, :num].tolist() == wanted.logprobs.top_ids[at, :num].tolist()
            for name in ("chosen", "top"):
                pair = [getattr(rows, name)[at].flatten()[:num] for rows in (made.logprobs, wanted.logprobs)]
                torch.testing.assert_close(*pair, atol=2e-5, rtol=1e-5)


def asked_of(drawn: list[Case]) -> list[int | None]:
    return [case.params.logprobs for case in drawn for _ in case.logits]


def some_cases(every: list[dict[str, Any]], temperature: float = 1.0, spread: float = 3.0, seed: int = 0) -> list[Case]:
    random = np.random.default_rng(seed)
    return [
        Case(
            SamplingParams(**({"temperature": temperature, "max_tokens": None} | fields)),
            tuple(random.integers(0, 12, 8).tolist()), 4, drafts := tuple(random.integers(0, 12, i % 3).tolist()),
            random.normal(0, spread, (len(drafts) + 1, VOCAB)).astype(np.float32), seed=i - 3, sample_index=i % 2,
            eos_ids=(7,),
        )
        for i, fields in enumerate(every)
    ]


@given(cases(np.float32, max_size=4), st.sampled_from(MODES))
@settings(max_examples=8)
def test_any_batch_gives_what_the_torch_code_gives(device: torch.device, drawn: list[Case], mode: str) -> None:
    batch = make_batch(drawn, device=str(device))
    made, wanted = (sampled_by(kind, batch, logprobs=mode) for kind in ("triton", "reference"))
    asked = [None if n == -1 else n for n in asked_of(drawn)]  # the whole vocabulary: both are the torch code
    assert_equal(made, wanted, asked)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_everything_at_once_over_several_tiles(device: torch.device, mode: str, temperature: float) -> None:
    loud = {name: value for name, value in LOUD.__dict__.items() if name not in ("temperature", "max_tokens")}
    drawn = some_cases([loud, loud | {"top_k": 0, "logprobs": 0}, {}], temperature)
    batch = make_batch(drawn, device=str(device), limits=LIMITS)
    made, wanted = (sampled_by(kind, batch, logprobs=mode) for kind in ("triton", "reference"))
    assert_equal(made, wanted, asked_of(drawn))
    assert not wanted.bad.any()


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_every_parameter_alone(device: torch.device, temperature: float) -> None:
    for first in range(0, len(ALONE), 8):
        drawn = some_cases(ALONE[first : first + 8], temperature, seed=first)
        batch = make_batch(drawn, device=str(device), limits=LIMITS)
        made, wanted = (sampled_by(kind, batch) for kind in ("triton", "reference"))
        assert_equal(made, wanted, asked_of(drawn))


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_grammars_beside_every_other_edit(device: torch.device, temperature: float) -> None:
    """Masks of both tiles, one for each draft, over logits that are edited otherwise too; the last has none."""
    loud = {name: value for name, value in LOUD.__dict__.items() if name not in ("temperature", "max_tokens")}
    drawn = []
    for i, case in enumerate(some_cases([{}, loud, {"top_p": 0.8}, {"logit_bias": {1499: 90.0}}, {}], temperature)):
        if i < 4:
            params = replace(case.params, structured_outputs=StructuredOutputsParams(json_object=True))
            allowed = np.random.default_rng(i).random(case.logits.shape) < 0.3
            case = replace(case, params=params, allowed=allowed)
        drawn.append(case)
    batch = make_batch(drawn, device=str(device), limits=LIMITS)
    made, wanted = (sampled_by(kind, batch) for kind in ("triton", "reference"))
    assert_equal(made, wanted, asked_of(drawn))
    masks = [row for case in drawn[:4] if case.allowed is not None for row in case.allowed]
    assert all(mask[token] for mask, token in zip(masks, wanted.tokens.tolist(), strict=False))
    needs = StepNeeds.everything(8)
    assert_equal(sampled_by("triton", replace(batch, needs=needs, extras=StepExtras())), wanted, asked_of(drawn))


# Thresholds

SHAPES = {
    "flat": lambda r: r.normal(0, 0.6, (1, VOCAB)),
    "narrow": lambda r: r.normal(0, 0.004, (1, VOCAB)),  # random weights give such logits: all in one bin
    "very narrow": lambda r: r.normal(0, 2e-5, (1, VOCAB)),
    "narrow but one": lambda r: np.concatenate([[[-90.0]], r.normal(5, 0.002, (1, VOCAB - 1))], axis=1),
    "peaked": lambda r: np.concatenate([r.normal(14, 2, (1, 20)), r.normal(0, 2, (1, VOCAB - 20))], axis=1),
    "ties": lambda r: np.round(r.normal(0, 2, (1, VOCAB))),
    "equal": lambda r: np.full((1, VOCAB), 3.25),
    "far": lambda r: -np.exp(r.normal(3, 2, (1, VOCAB))),  # many beyond the linear bins
    "few": lambda r: np.where(r.random((1, VOCAB)) < 0.01, r.normal(0, 1, (1, VOCAB)), -np.inf),
    "one": lambda r: np.where(np.arange(VOCAB)[None] == 1300, -2.5, -np.inf),
}
FILTERS = [{"top_k": 1}, {"top_k": 2, "top_p": 0.9}, {"top_k": 7, "top_p": 0.3}, {"top_k": 900, "top_p": 0.97},
           {"top_k": VOCAB}, {"top_p": 0.5}, {"top_p": 0.999, "min_p": 1e-3}, {"top_p": 1e-9},
           {"top_k": 60, "min_p": 0.5}, {"min_p": 0.01}]


CANDIDATES = [{"top_k": 3}, {"top_k": 20}, {"top_k": 7, "top_p": 0.3}, {"top_k": 24, "top_p": 0.97},
              {"top_k": 10, "min_p": 0.5}, {"top_k": 15, "top_p": 1e-9}]
SMALL_ROOMS = [("ties", 16), ("equal", 16)]  # equal logits are candidates together


@pytest.mark.parametrize(("shape", "room"), [*((shape, 8192) for shape in SHAPES), *SMALL_ROOMS])
def test_filters_keep_what_a_sort_keeps(
    device: torch.device, shape: str, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where more candidates are found than there is room for."""
    monkeypatch.setattr(filtered_draw, "_ROOM", room)
    assert_sorted_alike(FILTERS, shape, device, monkeypatch)


@pytest.mark.parametrize(("shape", "room", "many_rows"), [
    ("flat", 8192, 16), ("ties", 8192, 1), ("very narrow", 8192, 1), ("flat", 16, 16),
])
def test_candidates_of_many_tiles(device: torch.device, shape: str, room: int, many_rows: int,
                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles and groups: a k that is at most the number of groups bounds the candidates. Among many rows a kernel
    of its own looks for the bounds."""
    monkeypatch.setattr(filtered_draw, "_MANY_ROWS", many_rows)
    for module in (sampling, edits, filtered_draw):
        for name, value in (("QUADS", 16), ("TILE", 64), ("GROUP", 16)):
            monkeypatch.setattr(module, name, value, raising=False)
    monkeypatch.setattr(filtered_draw, "_ROOM", room)
    monkeypatch.setattr(sampling, "_tiles_per_span", lambda num_tiles, sms: 8)
    assert_sorted_alike(CANDIDATES, shape, device, monkeypatch)


def assert_sorted_alike(
    filters: list[dict[str, Any]], shape: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels draw the tokens that the torch code draws, and their thresholds keep what a sort keeps."""
    random = np.random.default_rng(len(shape))
    drawn = [
        Case(SamplingParams(temperature=[1.0, 0.31, 4.0][i % 3], logprobs=0, **fields), (1,), 1, (),
             SHAPES[shape](random).astype(np.float32), seed=i)
        for i, fields in enumerate(filters)
    ]
    batch = make_batch(drawn, device=str(device), limits=LIMITS)
    rows, row = batch.rows, batch.logit_rows.row
    made: list[filtered_draw.Drawn] = []
    draw = filtered_draw.draw_filtered
    monkeypatch.setattr(fused, "draw_filtered", lambda *args, **options: made.append(draw(*args, **options)) or made[0])
    ours, wanted = (sampled_by(kind, batch, logprobs="processed") for kind in ("triton", "reference"))
    assert_equal(ours, wanted, asked_of(drawn))
    # top_k of the whole vocabulary is no filter, and its threshold is not written
    thresholds = torch.where(rows.flags[row] == 0, -torch.inf, made[0].thresholds)
    scaled = scale(batch.logits, row, rows)
    kept = scaled.clone()
    keep_likely(kept, row, rows, batch.needs)
    assert torch.equal((scaled >= thresholds[:, None]) & scaled.isfinite(), kept.isfinite())


def test_rows_settle_in_two_rounds(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among many rows those that need another pivot wait for a round in which all programs weigh it."""
    monkeypatch.setattr(filtered_draw, "_MANY_ROWS", 1)
    drawn = some_cases([{"top_p": 0.3}, {"top_p": 0.1}, {"top_k": 900}, {"top_k": 1200, "top_p": 0.5}], spread=0.5)
    batch = make_batch(drawn, device=str(device), limits=LIMITS)
    wanted = sampled_by("reference", batch)
    assert_equal(sampled_by("triton", batch), wanted, asked_of(drawn))
    monkeypatch.setattr(filtered_draw, "_rounds", lambda num, thresholds: [(True, False)])
    assert sampled_by("triton", batch).tokens.tolist() != wanted.tokens.tolist(), "some rows need the second round"


def test_rows_at_the_limit_are_weighed_exactly(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The likelier half of the tokens weighs what top-p asks for, but for the last bits. Sums that are nearly right
    leave such rows to the second round."""
    monkeypatch.setattr(filtered_draw, "_MANY_ROWS", 1)
    logits = np.where(np.arange(VOCAB) % 2 == 0, 0.0, -0.5).astype(np.float32)[None]
    mass = probability_mass(torch.from_numpy(logits))[0]
    limit = float(mass[::2].sum() / mass.sum())
    drawn = [Case(SamplingParams(top_p=limit + sign * 1.5e-7), (1,), 1, (), logits, seed=i)
             for i in range(4) for sign in (-1, 1)]
    batch = make_batch(drawn, device=str(device), limits=LIMITS)
    wanted = sampled_by("reference", batch)
    assert {int(token) % 2 for token in wanted.tokens[::2]} == {0}, "the less likely half is left out by one of two"
    assert {int(token) % 2 for token in wanted.tokens[1::2]} == {0, 1}
    assert_equal(sampled_by("triton", batch), wanted, asked_of(drawn))
    monkeypatch.setattr(filtered_draw, "_rounds", lambda num, thresholds: [(True, False)])
    assert sampled_by("triton", batch).tokens.tolist() != wanted.tokens.tolist(), "some rows need the second round"


@compiler.jit
def _mass_kernel(scaled, out, SIZE: tl.constexpr):
    index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + index, masses.probability_mass(tl.load(scaled + index)))


def test_masses_are_those_of_the_torch_code(device: torch.device) -> None:
    random = np.random.default_rng(0)
    values = np.concatenate([-random.exponential(6, 8000), -random.exponential(1e-3, 180), [0.0, -0.0, -np.inf, -1e-40,
                             -27.7, -27.8, -44.0, -1e30, -0.5, -1.0, -2.0, -64.0]]).astype(np.float32)
    scaled = torch.from_numpy(values).to(device)
    out = torch.empty(8192, dtype=torch.int64, device=device)
    _mass_kernel[(8,)](scaled, out, SIZE=1024, enable_fp_fusion=False)
    assert torch.equal(out, probability_mass(scaled))
    exact = np.exp(values.astype(np.float64)) * 2.0**40
    assert np.all(np.abs(out.cpu().numpy() - exact) <= 4e-6 * exact + 1)
    assert out[8180] == 2**40 and out[8182] == 0


# Mates


def test_a_plain_row_is_drawn_alike_whatever_its_mates_ask_for(device: torch.device) -> None:
    plain = [{}, {"temperature": 0.0}, {"temperature": 0.3}, {"temperature": 2.5}]
    alone = some_cases(plain)
    # Scores that differ by rounding only: how a score is worked out decides.
    for case in alone:
        case.logits[:] = np.round(case.logits[:, :1]) + 1e-3 * np.round(case.logits * 3)
    mates = some_cases([{"top_p": 0.5}, LOUD.__dict__ | {"max_tokens": None}, {"logprobs": 2}], seed=1)
    with mock.patch.object(sampling, "draw_tokens", wraps=sampling.draw_tokens) as drawn_at_once:
        first = sampled_by("triton", make_batch(alone, device=str(device), limits=LIMITS))
        assert drawn_at_once.call_count == 1
        beside = sampled_by("triton", make_batch([*mates, *alone], 1, str(device), LIMITS))
        assert drawn_at_once.call_count == 1
    assert beside.tokens[-len(first.tokens) :].tolist() == first.tokens.tolist()
    assert beside.bad[-len(first.tokens) :].tolist() == first.bad.tolist()


def test_order_rows_and_chunks_do_not_matter(device: torch.device) -> None:
    every = [ALONE[4], {}, LOUD.__dict__ | {"max_tokens": None}, ALONE[9], {"logprobs": 2, "temperature": 0.0}]
    drawn = some_cases(every)
    together = sampled_by("triton", make_batch(drawn, device=str(device), limits=LIMITS), logprobs="processed")
    back = sampled_by("triton", make_batch(drawn[::-1], 1, str(device), LIMITS), logprobs="processed",
                      chunk_elements=3 * VOCAB)
    sizes = [len(case.logits) for case in drawn]
    parts, reverse = together.tokens.split(sizes), back.tokens.split(sizes[::-1])[::-1]
    assert [p.tolist() for p in parts] == [p.tolist() for p in reverse]
    assert together.logprobs is not None and back.logprobs is not None
    for name in ("chosen", "rank", "top_ids", "top"):  # bit for bit
        ours, theirs = getattr(together.logprobs, name)[-2:], getattr(back.logprobs, name)[:2]
        assert torch.equal(ours[..., :2], theirs[..., :2]), name


def test_a_step_that_serves_any_batch_gives_what_exact_needs_give(device: torch.device) -> None:
    """A captured step launches everything. Without penalties in use there are no counts, and none are read."""
    drawn = some_cases([{}, {"temperature": 0.0}, ALONE[4], ALONE[10], {"logprobs": 3, "temperature": 0.6}])
    batch = make_batch(drawn, device=str(device), limits=LIMITS)
    assert batch.rows.counts.packed is None
    for has_counts in (False, True):
        if has_counts:
            batch = make_batch([*drawn, *some_cases([ALONE[9]])], device=str(device), limits=LIMITS)
            drawn = [*drawn, *some_cases([ALONE[9]])]
        wanted = sampled_by("triton", batch)
        needs = StepNeeds.everything(8)
        assert_equal(sampled_by("triton", replace(batch, needs=needs, extras=StepExtras())), wanted, asked_of(drawn))


@pytest.mark.parametrize("length", [1, 3])
def test_spans_do_not_matter(device: torch.device, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = some_cases([LOUD.__dict__ | {"max_tokens": None}, ALONE[6], {}])
    batch = make_batch(drawn, device=str(device), limits=LIMITS)
    wanted = sampled_by("triton", batch)
    monkeypatch.setattr(sampling, "_tiles_per_span", lambda num_tiles, sms: length)
    assert_equal(sampled_by("triton", batch), wanted, asked_of(drawn))


# Log-probabilities


@pytest.mark.parametrize("room", [1024, 2])
def test_logprobs_of_ties_and_masked_logits(
    device: torch.device, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "_ROOM", room)
    drawn = some_cases([{"logprobs": 5, "top_k": 3}, {"logprobs": 5}, {"logprobs": 1}, {"logprobs": 7}])
    drawn[1].logits[:] = 1.5
    drawn[2].logits[:] = np.round(drawn[2].logits)
    drawn[3].logits[:, ::3] = -np.inf
    batch = make_batch(drawn, device=str(device), limits=LIMITS)
    for mode in MODES:
        made, wanted = (sampled_by(kind, batch, logprobs=mode) for kind in ("triton", "reference"))
        assert_equal(made, wanted, asked_of(drawn))


def test_logprobs_of_great_logits(device: torch.device) -> None:
    """A logit_bias may force a choice: beside 1e9 a sum of float32 keeps nothing of how likely each of the few is."""
    asked = {"logprobs": 4, "logit_bias": {token: 1e9 for token in range(3, 40)}}
    drawn = some_cases([asked | {"temperature": 0.0}, asked])
    batch = make_batch(drawn, device=str(device), limits=LIMITS)
    made, wanted = (sampled_by(kind, batch, logprobs="processed") for kind in ("triton", "reference"))
    assert made.logprobs is not None and float(made.logprobs.chosen.max()) == pytest.approx(-np.log(37), abs=1e-5)
    assert_equal(made, wanted, asked_of(drawn))


def bits(rows: LogprobRows) -> tuple[torch.Tensor, torch.Tensor]:
    return rows.ids, rows.values.view(torch.int32)


@pytest.mark.parametrize("num", [0, 20, 200, -1])
def test_given_tokens_have_the_log_probabilities_of_sampled_ones(device: torch.device, num: int) -> None:
    """Bit for bit, however the logit rows lie in memory and however many come together. For more tokens than kernels
    report, the torch code samples."""
    shapes = [SHAPES[name] for name in ("flat", "ties", "equal", "few")]
    random = np.random.default_rng(3)
    drawn = [Case(SamplingParams(logprobs=num, temperature=[0.0, 0.7][i % 2]), (1,), 1, (),
                  make(random).astype(np.float32), seed=i) for i, make in enumerate(shapes)]
    batch = make_batch(drawn, device=str(device), limits=replace(LIMITS, max_requests=len(drawn)))
    made = sampled_by("triton", batch)
    assert made.logprobs is not None and not made.bad.any()
    apart = torch.full((len(drawn), VOCAB + 3), 77.0, device=device)[:, 1 : VOCAB + 1].copy_(batch.logits)
    with ops.using("triton", report_tokens):
        for given in (batch.logits, apart):
            together = logprob_rows(given, made.tokens, num)
            alone = LogprobRows.join([logprob_rows(given[i : i + 1], made.tokens[i : i + 1], num)
                                      for i in range(len(drawn))])
            for found in (together, alone):
                assert all(map(torch.equal, bits(found), bits(made.logprobs)))


def test_mates_that_kernels_cannot_serve_leave_log_probabilities_as_they_are(device: torch.device) -> None:
    """The torch code samples then, for all of them, and reports by the same kernels."""
    drawn = some_cases([{"logprobs": 3}, {"logprobs": 3, "temperature": 0.0}, {"logprobs": 3, "top_p": 0.9}])
    mate = some_cases([{"logprobs": -1}])
    for mode in MODES:
        alone = sampled_by("triton", make_batch(drawn, device=str(device), limits=LIMITS), logprobs=mode)
        with ops.using("reference", sampler.sample_chunk), ops.using("triton", report_tokens):
            beside = make_batch([*drawn, *mate], device=str(device), limits=LIMITS).sample(logprobs=mode)
        assert alone.logprobs is not None and beside.logprobs is not None
        count = len(alone.tokens)
        assert torch.equal(alone.logprobs.rank, beside.logprobs.rank[:count])
        assert torch.equal(alone.logprobs.top, beside.logprobs.top[:count, :3])
        assert torch.equal(alone.logprobs.chosen, beside.logprobs.chosen[:count])


@pytest.mark.parametrize("num", [0, 3, 200])
def test_a_token_beside_a_nan_has_no_log_probability(device: torch.device, num: int) -> None:
    logits, tokens = torch.randn(5, VOCAB, device=device), torch.arange(5, device=device)
    logits[0, 3], logits[1, 1400], logits[2] = torch.nan, torch.inf, -torch.inf
    with ops.using("triton", report_tokens):
        found = logprob_rows(logits, tokens, num)
    assert found.values.isnan().all(dim=1).tolist() == [True, True, True, False, False]
    assert bool(((found.ids >= 0) & (found.ids < VOCAB)).all())


# What cannot be served


def test_without_a_place_for_lists_the_torch_code_samples(device: torch.device) -> None:
    small = replace(LIMITS, max_list_ints=16)
    drawn = some_cases([{"logit_bias": {t: 9.0 for t in range(9)}}, {"logprobs": 2}])
    batch = make_batch(drawn, device=str(device), limits=small)
    assert batch.rows.lists.unplaced == {batch.row[0]}
    with mock.patch.object(fused, "sample_fused", side_effect=AssertionError):
        made = sampled_by("triton", batch)
    assert_equal(made, sampled_by("reference", batch), asked_of(drawn))
    assert bool((made.tokens[: len(drawn[0].logits)] < 9).all())


# Counts


def table_of(counts: torch.Tensor) -> CountTable:
    return CountTable(counts, torch.tensor([counts.data_ptr()], device=counts.device), counts.shape[1])


def test_runs_are_counted(device: torch.device) -> None:
    counts = torch.randint(0, 9, (5, 40), dtype=torch.int32).to(device)
    row = torch.tensor([3, 1, 0, 4], device=device)
    run = torch.tensor([[7, 7, 39], [5, 6, 7], [1, 1, 1], [0, 2, 4]], device=device)
    run_len = torch.tensor([3, 1, 0, 2], device=device)
    wanted, made = counts.clone(), counts.clone()
    reference.count_runs(row, run, run_len, table_of(wanted))
    token_counts.count_runs(row, run, run_len, table_of(made))
    assert torch.equal(made, wanted) and made[3, 7] == counts[3, 7] + 2
    assert not torch.equal(made, counts)
    nothing = CountTable(None, torch.zeros(1, dtype=torch.int64, device=device), 40)
    for kind in (reference, token_counts):
        kind.count_runs(row, run, run_len, nothing)  # type: ignore[attr-defined]


def test_wrappers_name_what_is_wrong(device: torch.device) -> None:
    batch = make_batch(some_cases([ALONE[0]]), device=str(device), limits=LIMITS)
    rows: SamplingRows = batch.rows
    spans, row = sampling.plan_spans(batch.logits), batch.logit_rows.row
    good = filtered_draw.FilterRows(rows.flags, rows.temperature, rows.top_k, rows.top_p, rows.min_p_floor, rows.seed,
                                    rows.sample_index, rows.num_logprobs)
    position = batch.logit_rows.position
    with pytest.raises(ValueError, match="draw_filtered: rows.top_p "):
        filtered_draw.draw_filtered(batch.logits, batch.logits, row, position, good._replace(top_p=rows.top_k), spans)
    with pytest.raises(ValueError, match="draw_filtered: edited "):
        filtered_draw.draw_filtered(batch.logits, batch.logits[:, 1:], row, position, good, spans)
    with pytest.raises(ValueError, match="draw_filtered: position "):
        filtered_draw.draw_filtered(batch.logits, batch.logits, row, position[:0], good, spans)
    with pytest.raises(ValueError, match="count_runs: run "):
        token_counts.count_runs(row, row[:, None].int(), row, rows.counts.table)
    inputs = logprobs.LogprobLogits(batch.logits, batch.logits, row, rows.num_logprobs, rows.flags, rows.temperature,
                                    batch.logits[:, 0].contiguous(), spans.greatest)
    with pytest.raises(ValueError, match="token_logprobs: most is 200"):
        logprobs.token_logprobs(inputs, row, spans, 200, processed=False)
