"""How many drafts: the choice with the most expected tokens per second, against brute force; ceilings; trying again."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.core import RequestResult
from outrider.core.costs import DraftCost, ReadCost, StepCosts
from outrider.core.params import SamplingParams
from outrider.runner.graphs.costs import REPEATS, best_seconds, measured_sizes
from outrider.sched.request import Request, State
from outrider.speculation.acceptance import Acceptance
from outrider.speculation.choosers import auto_drafts
from outrider.speculation.draft_counts import DraftCounts, DraftPlan, FixedDrafts
from outrider.speculation.drafter_tries import PROBE_ALL_AFTER, PROBE_DEPTH_AFTER, READ_STEPS, TRY_STEPS, ProposedDepth
from outrider.speculation.learned_drafts import MIN_GAIN
from tests.unit.made_requests import made_request

FLAT = StepCosts((1, 64), (1.0, 1.0))  # tokens are free
STEEP = StepCosts((1, 64), (1.0, 64.0))  # every token costs as much as the first


def running(request_id: int, proposed: int = 8, **params: object) -> Request:
    """A request that yields tokens, with drafts waiting on the device."""
    request = Request(request_id, made_request([5, 6, 7], SamplingParams(**params)), 64)  # type: ignore[arg-type]
    request.admitted_len, request.bound.at_most, request.num_proposed = 3, 3, proposed
    request.state = State.RUNNING
    return request


def observed(chooser: DraftCounts, request: Request, drafted: int, accepted: int, times: int = 20) -> None:
    for _ in range(times):
        result = RequestResult(request.id, 0, [1] * (accepted + 1), 1 + accepted, drafted, accepted)
        chooser.observe([(request, result, drafted)])


def test_drafts_are_taken_where_tokens_are_free_and_left_where_they_are_not() -> None:
    for costs, wanted in ((FLAT, 4), (STEEP, 0)):
        chooser, request = auto_drafts(4, costs, always_propose=True), running(0)
        assert chooser.choose([request], is_exact=False).num_drafts == [wanted]


def test_a_request_whose_drafts_fail_gets_none_while_its_neighbour_keeps_them() -> None:
    costs = StepCosts((1, 2, 16), (1.0, 1.2, 4.0))
    chooser, good, bad = auto_drafts(3, costs, always_propose=True), running(0), running(1)
    observed(chooser, good, 3, 3)
    observed(chooser, bad, 3, 0)
    assert chooser.choose([good, bad], is_exact=False).num_drafts == [3, 0]


def test_some_unlucky_drafts_do_not_keep_a_drafter_with_layers_from_the_next_request() -> None:
    """While it rests it sees no prompt, and would never be right again. Many unlucky drafts do."""
    costs = StepCosts((1, 2, 16), (1.0, 1.1, 4.0), drafting=(DraftCost(1, 0.15, 0.1),))
    chooser = auto_drafts(1, costs, always_propose=False)
    observed(chooser, running(0), 1, 0, times=4)
    assert chooser.choose([running(1)], is_exact=False).num_wanted == 1
    observed(chooser, running(0), 1, 0, times=100)
    assert chooser.choose([running(2)], is_exact=False).num_wanted == 0


def test_a_drafter_that_costs_guesses_no_more_than_is_checked() -> None:
    """A head runs once for each draft, whether the target checks it or not."""
    costs = StepCosts((1, 8), (1.0, 1.35), drafting=(DraftCost(1, 0.02, 0.02),))
    chooser, request = auto_drafts(4, costs, always_propose=False), running(0)
    observed(chooser, request, 4, 2, times=100)
    plans = [chooser.choose([request], is_exact=False) for _ in range(20)]
    assert plans[0] == DraftPlan([0], 2), "nothing was proposed before"
    assert plans[1:] == [DraftPlan([2], 2)] * 19
    waits = running(1, proposed=1)
    assert chooser.choose([waits], is_exact=True).num_drafts == [1], "the device is known to have one"


def test_a_drafter_that_costs_sees_a_prompt_beside_a_request_that_does_not_draft() -> None:
    costs = StepCosts((1, 8), (1.0, 1.5), drafting=(DraftCost(1, 0.1, 0.1),))
    chooser, bad, prompt = auto_drafts(2, costs, always_propose=False), running(0), running(1)
    for _ in range(TRY_STEPS):
        chooser.choose([bad], is_exact=False)
    observed(chooser, prompt, 2, 2)
    observed(chooser, bad, 2, 0)
    assert chooser.choose([bad], is_exact=False).num_wanted == 0
    prompt.admitted_len = 10
    assert chooser.choose([bad, prompt], is_exact=False) == DraftPlan([0, 0], 2)


def test_drafts_that_are_never_there_are_no_longer_scheduled() -> None:
    """Lookups find nothing in a text that is drawn at random, and the step is padded for their drafts all the same."""
    costs = StepCosts((1, 64), (1.0, 4.0), is_padded=True)
    chooser, request = auto_drafts(3, costs, always_propose=True), running(0, temperature=1.0)
    for _ in range(2):
        chooser.choose([request], is_exact=False)
    assert chooser.choose([request], is_exact=False).num_drafts == [3]
    for _ in range(9):
        chooser.observe([(request, RequestResult(request.id, 0, [1], 1, 0, 0), 3)])
        plan = chooser.choose([request], is_exact=False)
    assert plan.num_drafts == [0]
    # Nor are they looked for: a captured step without a lookup is the step of an engine without drafts.
    proposals = [chooser.choose([request], is_exact=False).num_wanted for _ in range(200)]
    assert proposals.count(0) > 190 and 1 in proposals


def test_a_draft_must_pay_for_the_noise_of_its_logit_row() -> None:
    costs = StepCosts((1, 64), (1.0, 1.01), logit_row_seconds=(0.0, 4.0, 9.0), is_padded=True)
    for params, wanted in (({"temperature": 0}, 2), ({"temperature": 1.0}, 0), ({"temperature": 0, "logprobs": 1}, 0)):
        chooser, request = auto_drafts(2, costs, always_propose=True), running(0, **params)
        for _ in range(3):
            plan = chooser.choose([request], is_exact=False)
        assert plan.num_drafts == [wanted]


def test_it_tries_again_after_a_while() -> None:
    costs = StepCosts((1, 8), (1.0, 1.5))
    chooser, request = auto_drafts(2, costs, always_propose=True), running(0)
    observed(chooser, request, 2, 0)
    chosen = [chooser.choose([request], is_exact=False).num_drafts[0] for _ in range(400)]
    assert chosen[0] == 0 and 0 < sum(chosen) < 40  # now and then, and no more


def test_a_drafter_that_costs_is_left_out_where_no_acceptance_would_pay() -> None:
    chooser, request = auto_drafts(2, STEEP, always_propose=False), running(0)
    assert not any(chooser.choose([request], is_exact=False).num_wanted for _ in range(200))


def test_new_requests_try_a_drafter_that_rests_from_their_prompts_on() -> None:
    """One that has rested in a request has not seen its text, so that no later step of a short request tries it. While
    drafts are seldom accepted, few requests try some, and one that gains goes on."""
    costs = StepCosts((1, 8), (1.0, 1.7), drafting=(DraftCost(1, 0.2, 0.2),))
    chooser = auto_drafts(1, costs, always_propose=False)
    tries = []
    for number in range(60):
        request = running(number)
        request.admitted_len = 10  # still computes its prompt
        seen = chooser.choose([request], is_exact=False).num_wanted
        request.admitted_len = 3
        drafts = 0
        for _ in range(60):
            plan = chooser.choose([request], is_exact=False)
            drafts += plan.num_drafts[0]
            if plan.num_drafts[0]:
                observed(chooser, request, 1, 0, times=1)
        assert bool(drafts) == bool(seen), "the drafter sees the prompts of the requests that try it"
        tries.append(drafts)
        chooser.forget(request)
    bad = tries[20:]
    assert 0 in bad and max(bad) == TRY_STEPS and 2 <= sum(count > 0 for count in bad) <= len(bad) // 3
    chooser, request = auto_drafts(1, costs, always_propose=False), running(99)
    observed(chooser, request, 1, 1)
    assert all(chooser.choose([request], is_exact=False).num_wanted for _ in range(60))


def test_requests_that_start_beside_others_wake_a_drafter_that_rests() -> None:
    """If they pay for it alone. Those that ran before get no drafts until it has read along for a while."""
    costs = StepCosts((1, 8), (1.0, 1.2), drafting=(DraftCost(1, 0.05, 0.05),))
    for own in (costs, replace(costs, is_padded=True)):
        chooser, old, new = auto_drafts(1, own, always_propose=False), running(0, max_tokens=None), running(1)
        old.end_len = 1000
        observed(chooser, old, 1, 0, times=100)
        for _ in range(3):
            assert chooser.choose([old], is_exact=False).num_wanted == 0
        observed(chooser, new, 1, 1, times=500)
        chooser.choose([old], is_exact=False)
        assert chooser.begin([new]) == 1
        plans = [chooser.choose([old, new], is_exact=False) for _ in range(READ_STEPS)]
        assert all(plan.num_wanted and plan.num_drafts == [0, 1] for plan in plans)


@pytest.mark.parametrize(("speculative", "most"), [(False, 0), (2, 2), (None, 4), (True, 4)])
def test_a_request_sets_its_own_ceiling(speculative: bool | int | None, most: int) -> None:
    for chooser in (auto_drafts(4, FLAT, always_propose=True), FixedDrafts(4)):
        request = running(0, speculative=speculative)
        assert chooser.choose([request], is_exact=False).num_drafts == [most]


def test_when_the_device_is_known_no_more_is_asked_for_than_waits_there() -> None:
    request = running(0, proposed=1)
    assert FixedDrafts(4).choose([request], is_exact=True).num_drafts == [1]
    assert FixedDrafts(4).choose([request], is_exact=False).num_drafts == [4]


def test_a_prompt_that_is_being_computed_has_no_drafts() -> None:
    request = running(0)
    request.admitted_len = 10
    for costs in (FLAT, replace(FLAT, is_padded=True)):
        chooser = auto_drafts(4, costs, always_propose=False)
        for _ in range(2):
            assert chooser.choose([request], is_exact=False) == DraftPlan([0], 4), "a drafter must see the prompt"
    assert auto_drafts(4, STEEP, always_propose=False).choose([request], is_exact=False) == DraftPlan([0], 0)


def test_padded_steps_give_all_requests_the_same_and_no_more_than_was_proposed() -> None:
    costs = StepCosts((1, 64), (1.0, 1.2), (DraftCost(1, 0.01, 0.01),), is_padded=True)
    chooser, requests = auto_drafts(3, costs, always_propose=False), [running(0), running(1)]
    for request in requests:
        observed(chooser, request, 3, 2, times=100)
    plans = [chooser.choose(requests, is_exact=False) for _ in range(2)]
    assert plans[0].num_drafts == [0, 0], "nothing was proposed before"
    assert plans[1].num_drafts == [2, 2]
    assert [plan.num_wanted for plan in plans] == [2, 2], "the third draft never held, and its pass is saved"


def test_bad_luck_with_a_later_draft_is_forgotten() -> None:
    """What is no longer tried goes back to what requests usually show."""
    costs = StepCosts((1, 64), (1.0, 1.02), (DraftCost(1, 0.05, 0.2),), is_padded=True)
    chooser, usual, unlucky = auto_drafts(2, costs, always_propose=False), running(0), running(1)
    observed(chooser, usual, 2, 2, times=60)
    observed(chooser, unlucky, 2, 1, times=30)
    assert chooser.choose([unlucky], is_exact=False).num_wanted == 1
    observed(chooser, unlucky, 1, 1, times=120)
    assert chooser.choose([unlucky], is_exact=False).num_wanted == 2


def test_one_draft_more_is_tried_now_and_then() -> None:
    depth = ProposedDepth(3, tries_from_rest=True)
    used, proposed = [], []
    for _ in range(3 * PROBE_DEPTH_AFTER + 1):
        used.append(depth.next(1))
        proposed.append(depth.proposed)
    assert used.count(2) == proposed.count(2) == 3 and used[0] == 0 and set(used[1:]) == {1, 2}
    assert all(now == before for before, now in zip(proposed, used[1:], strict=False))
    depth = ProposedDepth(3, tries_from_rest=True)
    assert sum(depth.next(0) for _ in range(2 * PROBE_ALL_AFTER + 1)) == 2


def test_reading_the_context_is_part_of_the_choice() -> None:
    """Tokens cost so much that drafts do not pay, until most of a step is reading a long context."""
    costs = StepCosts((1, 2), (1.0, 2.0), reading=(ReadCost(None, 0.001), ReadCost(50, 0.001)), is_padded=True)
    assert costs.read([10, 100]) == pytest.approx(0.17)
    assert replace(costs, row_seconds=1.0).read([10, 100]) == pytest.approx(2.17)
    for length, wanted in ((3, 0), (6000, 1)):
        chooser, request = auto_drafts(1, costs, always_propose=False), running(0)
        observed(chooser, request, 1, 1)
        request.admitted_len = request.bound.at_most = length
        assert chooser.choose([request], is_exact=False).num_wanted == wanted


def test_proposals_cost_by_the_number_of_requests() -> None:
    costs = StepCosts((1,), (1.0,), (DraftCost(1, 0.1, 0.02), DraftCost(9, 0.9, 0.1)))
    assert costs.draft(0, 5) == 0 and costs.draft(1, 1) == 0.1
    assert costs.draft(3, 5) == pytest.approx(0.5 + 2 * 0.06)


def test_padded_steps_cost_what_all_requests_at_equal_counts_cost() -> None:
    costs = StepCosts((1, 4, 8), (1.0, 1.0, 8.0), is_padded=True)
    assert costs.step(4, 4) == 1.0
    assert costs.step(5, 4) == costs.step(8, 4) == 8.0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 8)), min_size=1, max_size=3), st.lists(
    st.floats(0.05, 2.0), min_size=4, max_size=4), st.booleans())
def test_the_choice_is_the_best_of_all(history: list[tuple[int, int]], steps: list[float], is_padded: bool) -> None:
    seconds = tuple(itertools.accumulate(steps))
    costs = StepCosts((1, 3, 6, 12), seconds, (DraftCost(1, 0.1, 0.02),), is_padded=is_padded)
    chooser = auto_drafts(3, costs, always_propose=True)
    requests = [running(i) for i in range(len(history))]
    for request, (accepted, times) in zip(requests, history, strict=True):
        observed(chooser, request, 3, accepted, times)
    gains = [chooser.acceptance.gains(request.id) for request in requests]
    chooser.choose(requests, is_exact=False)  # padded steps draft what the step before them proposed

    def rate(counts: tuple[int, ...]) -> float:
        expected = len(requests) + sum(sum(gain[:n]) for gain, n in zip(gains, counts, strict=True))
        # A padded step has as many tokens for every request as for the one with the most drafts.
        tokens = len(requests) * (1 + max(counts)) if is_padded else len(requests) + sum(counts)
        return expected / (costs.step(tokens, len(requests)) + costs.draft(max(counts)))

    best = max(map(rate, itertools.product(range(4), repeat=len(requests))))
    chosen = tuple(chooser.choose(requests, is_exact=False).num_drafts)
    # Drafts are taken by falling chance, which is best for a given number; none unless the gain exceeds the noise.
    assert rate(chosen) >= min(best, rate((0,) * len(requests)) * MIN_GAIN) * (1 - 1e-9) or rate(chosen) >= 0.97 * best


def test_large_steps_are_foreseen_on_a_cpu_and_measured_on_a_gpu() -> None:
    assert measured_sizes(1024, is_cuda=False)[-1] == 48 and measured_sizes(1024, is_cuda=True)[-2:] == [512, 1024]
    for most in (1, 5, 40):
        for is_cuda in (False, True):
            sizes = measured_sizes(most, is_cuda=is_cuda)
            assert sizes[-1] == most and sizes == sorted(set(sizes)), "no size beyond what a step can have"
    assert StepCosts((32, 48), (2.0, 3.0)).step(1024) == 3.0 + (1024 - 48) / 16


def test_long_runs_are_repeated_less() -> None:
    runs: list[int] = []
    best_seconds(lambda: runs.append(0), torch.device("cpu"), enough=60.0)
    assert len(runs) == REPEATS
    best_seconds(lambda: runs.append(0), torch.device("cpu"), enough=1e-9)
    assert len(runs) == REPEATS + 1


def test_a_request_inherits_nothing_of_one_that_has_ended() -> None:
    """Its counts take the place of the other's."""
    gains = []
    for has_ended in (False, True):
        acceptance = Acceptance(3)
        for _ in range(20):
            acceptance.observe([(1, 3, 0)])
        if has_ended:
            acceptance.forget(1)
        acceptance.observe([(2, 3, 3)])
        gains.append(acceptance.gains(2))
    assert gains[0] == gains[1]
