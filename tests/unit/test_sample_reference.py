"""The sampler against a naive one that works through one logit row at a time in Python, for every parameter.

Also the home of that reference, and of the requests and batches that the other tests of the sampler draw.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core import Admission, Limits
from outrider.core.params import SamplingParams
from outrider.core.structured import StructuredOutputsParams
from outrider.sample import History, LogitRows, Sampled, SamplingRows, StepExtras, StepNeeds, sample
from outrider.sample.sampler import Asked
from tests.unit.made_requests import made_admission

VOCAB = 13
LIMITS = Limits(
    max_requests=9, max_batched_tokens=64, max_len=24, max_drafts=4, vocab_size=VOCAB, max_stop_ids=5
)
MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class Case:
    """One request of a batch: what it knows, its drafts, and the logits [k + 1, V] of its logit rows."""

    params: SamplingParams
    known: tuple[int, ...]
    prompt_len: int
    drafts: tuple[int, ...]
    logits: np.ndarray
    seed: int = 0
    sample_index: int = 0
    eos_ids: tuple[int, ...] = ()
    max_len: int = LIMITS.max_len
    allowed: np.ndarray | None = None  # [k + 1, V] bool: what a grammar allows; None without one

    def after(self, j: int) -> Case:
        """The same request with its first j drafts known, and one logit row."""
        return replace(self, known=self.known + self.drafts[:j], drafts=(), logits=self.logits[j : j + 1],
                       allowed=None if self.allowed is None else self.allowed[j : j + 1])


def naive_philox(counter: list[int], key: list[int]) -> list[int]:
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & MASK, (p0 >> 32) ^ c[3] ^ k[1], p0 & MASK]
        k = [(k[0] + 0x9E3779B9) & MASK, (k[1] + 0xBB67AE85) & MASK]
    return c


def naive_gumbel(seed: int, sample_index: int, position: int, token: int) -> float:
    words = naive_philox([token // 4, position, sample_index, 0], [seed & MASK, (seed >> 32) & MASK])
    v = min((words[token % 4] + 0.5) * 2**-32, 1 - 2**-24)
    return -math.log(-math.log1p(-v))


def naive_edits(case: Case, j: int) -> np.ndarray:
    """The logits of row j after everything that changes single logits."""
    p, logits = case.params, case.logits[j].copy()
    number = logits.dtype.type
    history = [*case.known, *case.drafts[:j]]
    outputs = Counter(history[case.prompt_len :])
    stops = [*(() if p.ignore_eos else case.eos_ids), *(p.stop_token_ids or ())]
    for t in range(len(logits)):
        if p.allowed_token_ids is not None and t not in p.allowed_token_ids:
            logits[t] = -np.inf
        for word in p.bad_words_token_ids:
            if t == word[-1] and (len(word) == 1 or tuple(history[-(len(word) - 1) :]) == word[:-1]):
                logits[t] = -np.inf
        if case.allowed is None and t in stops and len(history) - case.prompt_len < p.min_tokens:
            logits[t] = -np.inf
        logits[t] += number((p.logit_bias or {}).get(t, 0))
        if t in history:
            repetition = number(np.float32(p.repetition_penalty))
            logits[t] = logits[t] / repetition if logits[t] > 0 else logits[t] * repetition
        logits[t] -= number(outputs[t]) * number(np.float32(p.frequency_penalty))
        logits[t] -= number(t in outputs) * number(np.float32(p.presence_penalty))
        if case.allowed is not None and not case.allowed[j, t]:
            logits[t] = -np.inf
    return logits


def naive_filters(params: SamplingParams, edited: np.ndarray) -> np.ndarray:
    """Scaled logits with what may not be drawn at -inf."""
    with np.errstate(over="ignore"):
        scaled = (edited - edited.max()) / edited.dtype.type(np.float32(params.temperature or 1))
    if params.is_greedy:
        return scaled
    if params.min_p > 0:
        scaled[scaled < np.log(edited.dtype.type(np.float32(params.min_p)))] = -np.inf
    if 0 < params.top_k < len(scaled):
        scaled[scaled < sorted(scaled, reverse=True)[params.top_k - 1]] = -np.inf
    if params.top_p < 1:
        mass = [int(math.exp(x) * 2**40) for x in scaled]
        before = [sum(m for m, y in zip(mass, scaled, strict=True) if y > x) for x in scaled]
        scaled[[b >= sum(mass) * float(np.float32(params.top_p)) for b in before]] = -np.inf
    return scaled


def naive_token(case: Case, j: int) -> tuple[int, bool]:
    """The token of logit row j, and whether the row is bad."""
    if not np.isfinite(case.logits[j].max()):
        return 0, True
    edited = naive_edits(case, j)
    if not np.isfinite(edited.max()):
        return 0, True
    scores = naive_filters(case.params, edited)
    if not case.params.is_greedy:
        position = len(case.known) + j
        noise = [naive_gumbel(case.seed, case.sample_index, position, t) for t in range(len(scores))]
        scores = scores + np.array(noise)
    return int(np.argmax(scores)), False


@dataclass(frozen=True)
class Batch:
    logits: torch.Tensor
    logit_rows: LogitRows
    rows: SamplingRows
    history: History
    needs: StepNeeds
    extras: StepExtras
    row: list[int]

    @property
    def asked(self) -> Asked:
        return Asked(self.logit_rows, self.rows, self.history, self.needs, self.extras, "processed")

    def sample(self, **options: object) -> Sampled:
        args = (self.logits, self.logit_rows, self.rows, self.history, self.needs, self.extras)
        return sample(*args, **options)  # type: ignore[arg-type]


def make_batch(cases: list[Case], row_seed: int = 0, device: str = "cpu", limits: Limits = LIMITS) -> Batch:
    """The cases in some rows of device state whose unused cells hold tokens of earlier owners."""
    random = np.random.default_rng(row_seed)
    row = [int(r) + 1 for r in random.permutation(limits.max_requests)[: len(cases)]]
    rows = SamplingRows(limits, torch.device(device))
    rows.admit([_admission(case, r) for case, r in zip(cases, row, strict=True)])
    for case, r in zip(cases, row, strict=True):
        if case.allowed is not None:
            padded = np.pad(case.allowed, ((0, 0), (0, -case.allowed.shape[1] % 32)))
            words = np.packbits(padded, axis=1, bitorder="little").view(np.int32)
            rows.masks.write([r * (limits.max_drafts + 1) + j for j in range(len(words))], words)
    tokens = torch.from_numpy(random.integers(0, limits.vocab_size, (limits.max_requests + 1, limits.max_len)))
    drafts = torch.from_numpy(random.integers(0, limits.vocab_size, (limits.max_requests + 1, limits.max_drafts)))
    known = torch.zeros(limits.max_requests + 1, dtype=torch.int64)
    for case, r in zip(cases, row, strict=True):
        known[r] = len(case.known)
        tokens[r, : len(case.known)] = torch.tensor(case.known)
        drafts[r, : len(case.drafts)] = torch.tensor(case.drafts, dtype=torch.int64)
    bound = min(max(len(case.known) for case in cases) + int(random.integers(0, 3)), limits.max_len)
    counts = [len(case.logits) for case in cases]
    params = [case.params for case in cases]
    places = [(i, r, j, len(case.known) + j) for i, (case, r) in enumerate(zip(cases, row, strict=True))
              for j in range(len(case.logits))]
    columns = torch.tensor(places, dtype=torch.int64).view(-1, 4).T.contiguous()
    request, logit_row, draft_index, position = columns.to(device)
    return Batch(
        logits=torch.from_numpy(np.concatenate([case.logits for case in cases])).to(device),
        logit_rows=LogitRows(request, logit_row, draft_index, position),
        rows=rows,
        history=History(tokens.to(device), known.to(device), drafts.to(device), bound),
        needs=StepNeeds.from_params(params, counts, are_lists_placed=not rows.lists.unplaced,
                                    any_masks=any(case.allowed is not None and len(case.logits) for case in cases)),
        extras=StepExtras.from_params(params, counts, torch.device(device)),
        row=row,
    )


def _admission(case: Case, row: int) -> Admission:
    return made_admission(row, case.known, case.max_len, case.params, prompt_len=case.prompt_len, seed=case.seed,
                          eos_ids=case.eos_ids, sample_index=case.sample_index)


TOKEN = st.integers(0, VOCAB - 1)


def half(strategy: st.SearchStrategy, default: object) -> st.SearchStrategy:
    return st.one_of(st.just(default), strategy)


def rarely(strategy: st.SearchStrategy, default: object) -> st.SearchStrategy:
    """Mostly off, so that stages also meet alone."""
    return st.one_of(st.just(default), st.just(default), strategy)


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 1.7, 1e-40])),
        top_k=draw(half(st.sampled_from([1, 2, 5, VOCAB, 1000, -1]), 0)),
        top_p=draw(half(st.sampled_from([1e-6, 0.3, 0.5, 0.9, 0.999]), 1.0)),
        min_p=draw(half(st.sampled_from([0.02, 0.3, 1.0]), 0.0)),
        presence_penalty=draw(rarely(st.sampled_from([-1.5, 0.7]), 0.0)),
        frequency_penalty=draw(rarely(st.sampled_from([-0.3, 1.1]), 0.0)),
        repetition_penalty=draw(rarely(st.sampled_from([0.6, 1.4]), 1.0)),
        min_tokens=draw(rarely(st.integers(1, 6), 0)),
        max_tokens=None,
        stop_token_ids=draw(rarely(st.lists(TOKEN, max_size=3), None)),
        ignore_eos=draw(st.booleans()),
        logit_bias=draw(rarely(st.dictionaries(TOKEN, st.sampled_from([-100.0, -1.0, 2.5, 50.0]), max_size=3), None)),
        allowed_token_ids=draw(rarely(st.lists(TOKEN, min_size=1, max_size=8), None)),
        bad_words_token_ids=draw(rarely(st.lists(st.lists(TOKEN, min_size=1, max_size=3).map(tuple), max_size=5)
                                        .map(tuple), ())),
        logprobs=draw(rarely(st.sampled_from([0, 3, -1]), None)),
    )


@st.composite
def case(draw: st.DrawFn, dtype: type = np.float64) -> Case:
    params, random = draw(sampling_params()), np.random.default_rng(draw(st.integers(0, 2**32)))
    num_known, num_drafts = draw(st.integers(1, 12)), draw(st.integers(0, LIMITS.max_drafts))
    # A small alphabet makes bad words and penalties meet the history.
    alphabet = random.integers(0, VOCAB, draw(st.sampled_from([1, 3, VOCAB])))
    if params.bad_words_token_ids and draw(st.booleans()):
        alphabet = np.array([t for word in params.bad_words_token_ids for t in word])
    allowed = None
    if draw(st.integers(0, 3)) == 0:
        params = replace(params, structured_outputs=StructuredOutputsParams(json_object=True))
        allowed = random.random((num_drafts + 1, VOCAB)) < draw(st.sampled_from([0.02, 0.5]))
    logits = random.normal(0, 3, (num_drafts + 1, VOCAB))
    if draw(st.booleans()):
        logits = np.round(logits)  # ties
    if draw(st.integers(0, 9)) == 0:
        logits[random.integers(0, num_drafts + 1), random.integers(0, VOCAB)] = draw(st.sampled_from([np.nan, np.inf]))
    return Case(
        params=params,
        known=tuple(int(t) for t in random.choice(alphabet, num_known)),
        prompt_len=draw(st.integers(1, num_known)),
        drafts=tuple(int(t) for t in random.choice(alphabet, num_drafts)),
        logits=logits.astype(dtype),
        seed=draw(st.integers(-(2**63) + 1, 2**63 - 1)),
        sample_index=draw(st.integers(0, 3)),
        eos_ids=draw(st.sampled_from([(), (3,), (1, 7)])),
        allowed=allowed,
    )


def cases(dtype: type = np.float64, max_size: int = 5) -> st.SearchStrategy[list[Case]]:
    return st.lists(case(dtype), min_size=1, max_size=max_size)


def _check_against_naive(drawn: list[Case]) -> None:
    found = make_batch(drawn).sample()
    expected = [naive_token(one, j) for one in drawn for j in range(len(one.logits))]
    assert found.tokens.tolist() == [token for token, _ in expected]
    assert found.bad.tolist() == [bad for _, bad in expected]


@given(cases(np.float64))
@settings(max_examples=80)
def test_every_parameter_agrees_with_the_naive_sampler_in_float64(drawn: list[Case]) -> None:
    _check_against_naive(drawn)


@given(cases(np.float32))
@settings(max_examples=60)
def test_every_parameter_agrees_with_the_naive_sampler_in_float32(drawn: list[Case]) -> None:
    _check_against_naive(drawn)


@given(cases())
@settings(max_examples=20)
def test_the_callers_logits_are_left_alone(drawn: list[Case]) -> None:
    batch = make_batch(drawn)
    before = batch.logits.clone()
    batch.sample(logprobs="processed")
    torch.testing.assert_close(batch.logits, before, rtol=0, atol=0, equal_nan=True)
