"""Token rows of captured steps that requests share: who gets drafts, against brute force; when all get the same."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from outrider.core import RequestResult
from outrider.core.costs import DraftCost, StepCosts
from outrider.core.decode_sizes import size_for, unequal_sizes
from outrider.sched.request import Request
from outrider.speculation.acceptance import HIT, TRIED
from outrider.speculation.learned_drafts import MIN_GAIN
from outrider.speculation.sized_drafts import HELD_STEPS, SHARE_GAIN, Foresight, SizedDrafts
from outrider.speculation.spread_acceptance import PROBE_PLANS, SpreadAcceptance
from tests.unit.test_draft_counts import running

# A dense model of 8B weights: the first 64 token rows cost hardly more than one, all others cost the same.
COSTS = StepCosts((1, 64, 128, 256, 512), (3.6, 4.0, 4.5, 6.3, 10.5), (DraftCost(1, 0.3, 0.25),), is_padded=True)
K = 5


class Decoding(NamedTuple):
    counts: list[list[int]]  # drafts of each request, by step
    rate: float  # tokens per second


def decode(chooser: SizedDrafts, count: int, rate_of: Callable[[int, int], float], steps: int,
           seed: int = 0) -> Decoding:
    """Run steps whose results come one step late. rate_of: of a request in a step."""
    requests, chance, chosen, proposed = [running(i) for i in range(count)], random.Random(seed), [], 0
    late: list[tuple[list[int], list[int]]] = []
    tokens, seconds = 0, 0.0
    for step in range(steps):
        plan = chooser.choose(requests, is_exact=False)
        chosen.append(plan.num_drafts)
        accepted = []
        for index, num in enumerate(plan.num_drafts):
            hits = 0
            while hits < min(num, proposed) and chance.random() < rate_of(index, step):
                hits += 1
            accepted.append(hits)
        rows = count + sum(plan.num_drafts)
        seconds += COSTS.step(rows, count) + COSTS.draft(plan.num_wanted, count)
        tokens += count + sum(accepted)
        late.append((plan.num_drafts, accepted))
        proposed = plan.num_wanted
        if len(late) > 1:
            chooser.observe([(request, RequestResult(request.id, 0, [1] * (1 + hits), 1 + hits, num, hits), num)
                             for request, num, hits in zip(requests, *late.pop(0), strict=True)])
    return Decoding(chosen, tokens / seconds)


def half(index: int, step: int) -> float:
    return 0.2 if index % 2 else 0.9


def test_requests_that_accept_more_get_more_and_the_rows_fill_a_captured_size() -> None:
    chosen = decode(SizedDrafts(K, COSTS), 64, half, 150).counts[60:]
    unequal = [counts for counts in chosen if len(set(counts)) > 1]
    assert len(unequal) > 80
    odd = [counts for counts in unequal if 64 + sum(counts) not in unequal_sizes(64, K)]
    assert len(odd) <= 1, "but for a step that tries one draft more"
    good, bad = (sum(counts[own] for counts in unequal for own in range(first, 64, 2)) for first in (0, 1))
    assert good > 8 * bad
    assert bad, "those that get none try one now and then"
    assert len({64 + sum(counts) for counts in unequal}) <= 6, "few graphs"


@pytest.mark.parametrize("rate", [0.2, 0.5, 0.7, 0.9])
def test_requests_that_are_alike_get_the_same_number_of_drafts(rate: float) -> None:
    """Whatever luck single requests have."""
    for counts in decode(SizedDrafts(K, COSTS), 64, lambda index, step: rate, 150, seed=int(100 * rate)).counts:
        assert len(set(counts)) == 1


def equal_drafts() -> SizedDrafts:
    """A chooser that takes all requests for alike."""
    chooser = SizedDrafts(K, COSTS)
    chooser.acceptance.learn_spread = lambda request_ids: None  # type: ignore[method-assign]
    return chooser


def test_numbers_of_their_own_are_faster_where_requests_differ() -> None:
    own, equal = (decode(chooser, 64, half, 300).rate for chooser in (SizedDrafts(K, COSTS), equal_drafts()))
    assert own > 1.07 * equal


def test_requests_whose_drafts_begin_to_fail_cost_no_time() -> None:
    """Every request changes after 80 steps, each at its own time, so that its past says little about its future."""
    def rate_of(index: int, step: int) -> float:
        return half((step + 17 * index) // 80, 0)

    own, equal = (decode(chooser, 64, rate_of, 400).rate for chooser in (SizedDrafts(K, COSTS), equal_drafts()))
    assert own > 0.985 * equal


def test_foresight_is_what_came_of_what_was_expected() -> None:
    foresight = Foresight()
    assert foresight.share == 1
    for _ in range(2000):
        foresight.observe(2.0, 1)
    assert foresight.share == pytest.approx(0.5, abs=0.05)
    for _ in range(200):
        foresight.fade(1)
    assert foresight.share > 0.99
    for _ in range(2000):
        foresight.observe(1.0, 2)
    assert foresight.share == 1, "luck promises nothing"


def test_unequal_numbers_hold_for_some_steps_of_the_same_requests() -> None:
    chooser, requests = SizedDrafts(K, COSTS), [running(i) for i in range(64)]
    decode(chooser, 64, half, 60)
    plans = [chooser.choose(requests, is_exact=False).num_drafts for _ in range(3 * HELD_STEPS)]
    assert max(len(list(same)) for _, same in itertools.groupby(plans)) >= HELD_STEPS - 1
    chooser.choose(requests, is_exact=False)
    fewer = requests[:60]
    counts = chooser.choose(fewer, is_exact=False).num_drafts
    assert len(counts) == 60 and 60 + sum(counts) == size_for(60, 60 + sum(counts), max(counts))


def test_a_request_without_drafts_tries_one_in_the_place_of_the_least_likely() -> None:
    chooser, requests = fixed_gains([[0.9, 0.8, 0.7]] * 8 + [[0.1, 0.1, 0.1]] * 8, (1.0, 1.01, 40.0))
    plans = [chooser.choose(requests, is_exact=False).num_drafts for _ in range(2 * HELD_STEPS * PROBE_PLANS - 1)][1:]
    assert {sum(counts) for counts in plans} == {16} and plans[0] == [2] * 8 + [0] * 8
    tries = sum(sum(counts[8:]) for counts in plans)
    assert 0 < tries <= 8 * 4 * HELD_STEPS


def fixed_gains(gains: list[list[float]], seconds: tuple[float, float, float], *,
                each: float = 0.0) -> tuple[SizedDrafts, list[Request]]:
    """A chooser that is told how likely drafts are. seconds: of steps of 1, of 32 and of 96 token rows."""
    costs = StepCosts((1, 32, 96), seconds, (DraftCost(1, each, each),), is_padded=True)
    chooser, requests = SizedDrafts(len(gains[0]), costs), [running(i) for i in range(len(gains))]
    chooser.acceptance.are_alike = False
    chooser.acceptance.learn_spread = lambda request_ids: None  # type: ignore[method-assign]
    chooser.acceptance.gains_of = lambda request_ids: [  # type: ignore[method-assign]
        gains[own] for own in request_ids]
    return chooser, requests


@pytest.mark.parametrize("seed", [0, 1, 4, 8, 11])
def test_the_choice_is_the_best_of_all(seed: int) -> None:
    """All counts of nine requests are tried, where a step costs what its captured size costs."""
    chance, count = random.Random(seed), 9
    gains = [list(itertools.accumulate((chance.random() for _ in range(2)), float.__mul__)) for _ in range(count)]
    seconds = tuple(itertools.accumulate((1.0, chance.random(), 4 * chance.random())))
    chooser, requests = fixed_gains(gains, seconds, each=0.1 * chance.random())  # type: ignore[arg-type]
    costs = chooser._costs

    def rate(counts: tuple[int, ...]) -> float:
        expected = count + sum(sum(own[:n]) for own, n in zip(gains, counts, strict=True))
        is_equal = len(set(counts)) == 1
        rows = count * (1 + counts[0]) if is_equal else size_for(count, count + sum(counts), max(counts))
        return expected / (costs.step(rows, count) + costs.draft(max(counts), count))

    best = max(map(rate, itertools.product(range(3), repeat=count)))
    chooser.choose(requests, is_exact=False)  # drafts are those that the step before proposed
    chosen = tuple(chooser.choose(requests, is_exact=False).num_drafts)
    assert rate(chosen) >= best / (SHARE_GAIN if any(chosen) else MIN_GAIN * SHARE_GAIN) * (1 - 1e-9)


def test_every_size_is_a_choice_until_there_are_no_more_drafts() -> None:
    assert list(unequal_sizes(9, 2)) == [18] and list(unequal_sizes(64, 2)) == [96, 128, 160]
    assert list(unequal_sizes(40, 1)) == [64] and not unequal_sizes(64, 0)


def test_requests_with_a_ceiling_of_their_own_leave_their_rows_to_others() -> None:
    chooser, _ = fixed_gains([[0.9, 0.8, 0.7]] * 16, (1.0, 1.01, 40.0))
    requests = [running(i, speculative=False if i < 8 else None) for i in range(16)]
    chooser.choose(requests, is_exact=False)
    counts = chooser.choose(requests, is_exact=False).num_drafts
    assert counts == [0] * 8 + [2] * 8


def observed(acceptance: SpreadAcceptance, rates: list[float], times: int, seed: int) -> list[float]:
    """The estimates of each request's first draft."""
    chance = random.Random(seed)
    for _ in range(times):
        acceptance.observe([(request_id, 1, int(chance.random() < rate)) for request_id, rate in enumerate(rates)])
    acceptance.learn_spread(range(len(rates)))
    return [acceptance.gains(request_id)[0] for request_id in range(len(rates))]


def test_rates_are_told_apart_only_where_they_differ_by_more_than_chance() -> None:
    for seed in range(10):
        alike, different = SpreadAcceptance(1), SpreadAcceptance(1)
        observed(alike, [0.6] * 64, 30, seed)
        estimates = observed(different, [0.9, 0.2] * 32, 30, seed)
        assert alike.are_alike and not different.are_alike
        assert min(estimates[::2]) > max(estimates[1::2])
        assert sum(estimates[::2]) / 32 == pytest.approx(0.9, abs=0.08)
        assert sum(estimates[1::2]) / 32 == pytest.approx(0.2, abs=0.08)
        assert different.gains(1000)[0] == pytest.approx(0.55, abs=0.05), "a new request: the mean of all"


def estimated(spread: float) -> tuple[np.ndarray[Any, Any], list[bool], bool]:
    """Estimates, due tries and whether requests seem alike, after random steps. Some requests rest, and some are
    new."""
    source, acceptance, ids = random.Random(2), SpreadAcceptance(3), list(range(48))
    gains, due = [], []
    for step in range(40):
        drafts = []
        for own in ids[:43]:
            rate, drafted = 0.5 + spread * (own % 2 - 0.5), source.randrange(1, 6)
            drafts.append((own, drafted, sum(source.random() < rate for _ in range(drafted))))
        acceptance.observe(drafts)
        due += [acceptance.is_probe_due(own) for own in source.sample(ids, 3)]
        if step % 8 == 0:
            acceptance.learn_spread(ids)
        gains.append(acceptance.gains_of(ids))
    return np.array(gains), due, acceptance.are_alike


@pytest.mark.parametrize("spread", [0.0, 0.8])
def test_many_requests_are_counted_as_few_are(spread: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With numpy for all at once, or request by request."""
    gains, due, are_alike = estimated(spread)
    monkeypatch.setattr("outrider.speculation.acceptance.MANY", 100)
    other_gains, other_due, other_alike = estimated(spread)
    assert gains == pytest.approx(other_gains) and due == other_due and are_alike == other_alike == (spread == 0)
    assert 0 < sum(due) < len(due)


def test_rates_that_differ_little_are_drawn_to_their_mean() -> None:
    near = SpreadAcceptance(1)
    estimates = observed(near, [0.5 + 0.4 * (i / 63 - 0.5) * 2 for i in range(64)], 30, 1)
    counts = near._counts.values[near._counts.find_all(range(64))]
    raw = (counts[:, HIT, 0] / counts[:, TRIED, 0]).tolist()
    assert not near.are_alike
    assert max(estimates) - min(estimates) < max(raw) - min(raw)


def test_what_a_few_requests_show_says_nothing_about_a_spread() -> None:
    few = SpreadAcceptance(1)
    observed(few, [1.0, 0.0, 0.0], 30, 0)
    assert few.are_alike
