"""Chances of drafts by how sure their drafter is, and the counts that the scheduler makes of them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from outrider.core import Finish, RequestResult, ScheduledBatch, StepResult
from outrider.core.costs import StepCosts
from outrider.core.decode_sizes import unequal_sizes
from outrider.core.draft_confidence import LEVEL_BITS, NUM_LEVELS, TOP_LEVEL, levels_of
from outrider.core.structured import StructuredOutputsParams
from outrider.sched.request import Request
from outrider.sched.updates import apply_results
from outrider.speculation.draft_chances import MANY, DraftChances
from outrider.speculation.individual_drafts import IndividualDrafts
from outrider.speculation.sized_drafts import CHAINS_EACH, WEIGH_LEVELS_EVERY, SizedDrafts, extended
from tests.unit.test_draft_counts import running
from tests.unit.test_shared_rows import COSTS, K


def packed(*levels: int) -> int:
    return sum(level << LEVEL_BITS * place for place, level in enumerate(levels))


def test_levels_are_packed_four_bits_each() -> None:
    assert levels_of(packed(3, 0, 15, 1), 4) == [3, 0, 15, 1] and levels_of(packed(3, 9), 1) == [3]
    assert max(levels_of(-1, 15)) == TOP_LEVEL, "whatever a drafter returns"


def learned(rate: list[float], seed: int = 0, *, own: float = 1.0, request: int = 1,
            chances: DraftChances | None = None, steps: int = 600) -> DraftChances:
    """After drafts of random levels, accepted at the rate of their level."""
    source, chances = random.Random(seed), chances or DraftChances(3)
    for _ in range(steps):
        levels = [source.randrange(1, NUM_LEVELS) for _ in range(3)]
        accepted = 0
        while accepted < 3 and source.random() < own * rate[levels[accepted]]:
            accepted += 1
        chances.observe([(request, packed(*levels), 3, accepted)])
    return chances


def test_a_level_is_worth_what_was_accepted_of_it() -> None:
    honest = learned([level / NUM_LEVELS for level in range(NUM_LEVELS)])
    sure, unsure = honest.gains(2, packed(15, 15), 2), honest.gains(2, packed(2, 15), 2)
    assert sure[0] > 0.8 and sure[1] > 0.65 and unsure[0] < 0.3 and unsure[1] < unsure[0]
    flat = learned([0.5] * NUM_LEVELS)
    gains = [flat.gains(2, packed(level), 1)[0] for level in range(1, NUM_LEVELS)]
    assert min(gains) > 0.3 and max(gains) < 0.7, "levels that say nothing are not believed"


def test_a_request_has_a_factor_of_its_own() -> None:
    chances = DraftChances(3)
    for turn in range(200):
        learned([0.5] * NUM_LEVELS, turn, own=1.8, request=1, chances=chances, steps=2)
        learned([0.5] * NUM_LEVELS, turn, own=0.2, request=2, chances=chances, steps=2)
    good, bad = chances.factor(1), chances.factor(2)
    assert good > 1.1 and bad < 0.6 and chances.factor(3) == 1.0
    chances.forget(1)
    assert chances.factor(1) == 1.0


def test_further_drafts_are_as_likely_as_usual() -> None:
    waiting = [[0.9, 0.0], [0.0, 0.0], [0.9, 0.8], [0.9, 0.0], [0.9, 0.8]]
    usual = [[0.5, 0.25], [0.5, 0.25], [0.5, 0.25], [0.0, 0.0], [0.5, 0.25]]
    gains = extended(np.array(waiting), np.array([1, 0, 2, 1, 3]), np.array(usual))
    assert gains == pytest.approx(np.array([[0.9, 0.45], [0.5, 0.25], [0.9, 0.8], [0.9, 0.0], [0.9, 0.8]]))


def test_chains_have_the_gains_of_their_requests_drafts() -> None:
    chances = learned([level / NUM_LEVELS for level in range(NUM_LEVELS)], own=0.7)
    levels, counts = [packed(3, 9, 15), packed(15, 15, 15), packed(8, 1, 2), -1], [3, 2, 0, 3]
    gains = chances.gains_of_chains(chances.factors([1, 1, 2, 2]), np.array(levels), np.array(counts))
    for request, own, count, found in zip([1, 1, 2, 2], levels, counts, gains.tolist(), strict=True):
        assert found == chances.gains(request, own, count) + [0.0] * (3 - count)


def test_many_requests_are_counted_as_few_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """With numpy for all at once, or request by request."""
    source, many, few = random.Random(1), DraftChances(3), DraftChances(3)
    ids = list(range(2 * MANY))
    for _ in range(30):
        drafts = [(own, source.getrandbits(20), drafted := source.randrange(6), source.randint(0, drafted))
                  for own in ids]
        many.observe(drafts)
        with monkeypatch.context() as patch:
            patch.setattr("outrider.speculation.draft_chances.MANY", len(drafts) + 1)
            few.observe(drafts)
    assert many.rates == pytest.approx(few.rates) and np.array(many.table()) == pytest.approx(np.array(few.table()))
    assert many.factors(ids).tolist() == pytest.approx([few.factor(own) for own in ids])
    assert len({round(factor, 3) for factor in many.factors(ids)}) > len(ids) // 2, "they differ"


def settled(chooser: IndividualDrafts | SizedDrafts, request: Request, accepted: int, drafted: int, levels: int,
            proposed: int, *, is_shared: bool = False) -> None:
    """One step of the request, whose result says how sure the drafter is of its next drafts."""
    part = RequestResult(request.id, 0, [1] * (accepted + 1), 1 + accepted, drafted, accepted, proposed, levels=levels)
    step = ScheduledBatch(0, [request.id], [0], [1], [0], [0], [False], [0])
    apply_results({request.id: request}, step, StepResult(0, [part]))
    chooser.observe([(request, part, drafted)], is_shared=is_shared)


SURE, UNSURE = 15, 1


def shown(chooser: IndividualDrafts | SizedDrafts, requests: list[Request], steps: int = 60) -> None:
    """Sure drafts hold and others do not: half of the steps have three sure ones."""
    source = random.Random(3)
    for _ in range(steps):
        for request in requests:
            is_sure = request.levels == packed(*[SURE] * 3)
            level = source.choice([SURE, UNSURE])
            drafted = 3 if request.levels else 0
            settled(chooser, request, 3 if is_sure else 0, drafted, packed(*[level] * 3), 3)


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("finish", [Finish.NO, Finish.LENGTH])
def test_nothing_is_learned_from_the_last_step_of_a_request(finish: Finish, is_shared: bool) -> None:
    """Its end may have cut off drafts that would have been accepted."""
    chooser, request, levels = SizedDrafts(3, COSTS), running(0), packed(SURE, SURE, SURE)
    request.checked_levels = levels
    before = chooser.chances.gains(9, levels, 3)
    part = RequestResult(request.id, 0, [1], 1, 3, 0, 3, finish)
    chooser.observe([(request, part, 3)], is_shared=is_shared)
    after = chooser.chances.gains(9, levels, 3)
    assert after == before if finish else after[0] < before[0]
    assert (chooser.chances.factor(request.id) == 1.0) == bool(finish)


def test_individual_counts_learn_nothing_from_the_last_step_of_a_request() -> None:
    chooser = IndividualDrafts(3, StepCosts((1, 64), (1.0, 10.0)), always_propose=False)
    request, levels = running(0), packed(SURE, SURE, SURE)
    request.checked_levels = levels
    before = chooser.chances.gains(9, levels, 3)
    chooser.observe([(request, RequestResult(request.id, 0, [1], 1, 3, 0, 3, Finish.LENGTH), 3)])
    assert chooser.chances.gains(9, levels, 3) == before


def test_a_step_that_is_not_captured_checks_the_drafts_that_are_sure() -> None:
    chooser = IndividualDrafts(3, StepCosts((1, 64), (1.0, 10.0)), always_propose=False)
    requests = [running(0), running(1)]
    shown(chooser, requests)
    for request, level in zip(requests, (SURE, UNSURE), strict=True):
        request.levels, request.num_proposed = packed(*[level] * 3), 3
    for _ in range(3):  # the first plans only propose
        plan = chooser.choose(requests, is_exact=True)
    assert plan.num_drafts == [3, 0] and plan.num_wanted > 0 and plan.sharing is None
    requests[1].levels = packed(SURE, UNSURE, SURE)
    assert chooser.choose(requests, is_exact=True).num_drafts == [3, 1]
    requests[0].levels = packed(*[UNSURE] * 3)
    assert chooser.choose(requests, is_exact=False).num_drafts[0] > 0, \
        "while a step is in flight, the drafts that wait are not known"


class SharingDevice:
    """Decodes with drafts whose drafter knows which of them hold, or does not, and shares token rows out as it is
    told; results come one step late."""

    def __init__(self, count: int, says: bool, seed: int = 0) -> None:
        self.requests = [running(index) for index in range(count)]
        self._says, self._source = says, random.Random(seed)
        self._waiting: list[list[bool]] = [[] for _ in self.requests]  # is the draft sure?
        self._late: list[list[tuple[int, int, int, int, bool]]] = []
        self.totals: set[int] = set()
        self.tokens, self.seconds = 0, 0.0

    def run(self, chooser: SizedDrafts, steps: int) -> float:
        """Tokens per second."""
        for _ in range(steps):
            plan = chooser.choose(self.requests, is_exact=False)
            most = [min(num, len(own)) for num, own in zip(plan.num_drafts, self._waiting, strict=True)]
            counts, rows = most, sum(plan.num_drafts)
            if plan.sharing is not None:
                counts, rows = self._shared(most, plan.sharing.total), plan.sharing.total
                self.totals.add(rows)
            late = []
            for index, count in enumerate(counts):
                accepted = 0
                while accepted < count and self._source.random() < (0.9 if self._waiting[index][accepted] else 0.1):
                    accepted += 1
                self._waiting[index] = [self._source.random() < 0.5 for _ in range(plan.num_wanted)]
                levels = packed(*(SURE if sure else UNSURE for sure in self._waiting[index])) if self._says else 0
                late.append((count, accepted, levels, plan.num_wanted, plan.sharing is not None))
                self.tokens += 1 + accepted
            self.seconds += COSTS.step(len(counts) + rows, len(counts)) + COSTS.draft(plan.num_wanted, len(counts))
            self._late.append(late)
            if len(self._late) > 1:
                for request, (count, accepted, levels, wanted, is_shared) in zip(self.requests, self._late.pop(0),
                                                                                 strict=True):
                    settled(chooser, request, accepted, count, levels, wanted, is_shared=is_shared)
        return self.tokens / self.seconds

    def _shared(self, most: list[int], total: int) -> list[int]:
        gains = []
        for index, own in enumerate(most):
            reached = 1.0
            for sure in self._waiting[index][:own]:
                reached *= 0.9 if sure else 0.1
                gains.append((reached, index))
        chosen = [index for _, index in sorted(gains, key=lambda pair: -pair[0])[:total]]
        return [chosen.count(index) for index in range(len(most))]


def test_the_device_shares_rows_out_where_the_drafter_knows_what_holds() -> None:
    telling, silent = SharingDevice(64, says=True), SharingDevice(64, says=False)
    told, untold = (own.run(SizedDrafts(K, COSTS), 400) for own in (telling, silent))
    assert told > 1.03 * untold and not silent.totals
    assert telling.totals and {64 + total for total in telling.totals} <= set(unequal_sizes(64, K))
    assert len(telling.totals) <= 6, "few graphs"


def test_levels_are_weighed_now_and_then_while_that_does_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes longer than the step of a small model on a GPU."""
    chooser, weighed = SizedDrafts(K, COSTS), []  # factors of the chains that are weighed
    of_chains = chooser.chances.gains_of_chains

    def gains_of_chains(factors: Any, packed: Any, counts: Any) -> Any:
        weighed.extend(factors.tolist())
        return of_chains(factors, packed, counts)

    monkeypatch.setattr(chooser, "_best_shared", lambda *args: None)
    monkeypatch.setattr(chooser.chances, "gains_of_chains", gains_of_chains)
    SharingDevice(64, says=True).run(chooser, 80)
    each = CHAINS_EACH * 64
    assert 3 * each <= len(weighed) <= (80 / WEIGH_LEVELS_EVERY + 1) * each


def test_few_requests_and_requests_with_a_grammar_are_not_shared_out() -> None:
    few = SharingDevice(8, says=True)
    few.run(SizedDrafts(K, COSTS), 60)
    formed = SharingDevice(64, says=True)
    formed.requests[5] = running(5, structured_outputs=StructuredOutputsParams(regex="a+"))
    formed.run(SizedDrafts(K, COSTS), 60)
    assert not few.totals and not formed.totals
