"""How many tokens of prompts a step has: full steps while nobody decodes, otherwise what a bound of time allows, and
fewer where prompts have time."""

from __future__ import annotations

import random

import pytest

from outrider.cache.manager import CacheManager
from outrider.cache.pages import PagePool
from outrider.core import Finish, Limits, RequestResult, ScheduledBatch, StepResult
from outrider.core.costs import MixedStepCosts, ReadCost
from outrider.core.params import SamplingParams
from outrider.sched.full_step import PromptLine
from outrider.sched.prompt_time import ESTABLISHED_STEPS, Burst, Patience, PromptTime, burst_bounds
from outrider.sched.request import Request
from outrider.sched.scheduler import Scheduler
from outrider.sched.waiting import WaitingRequests
from tests.unit.hash_mixer import make_layout
from tests.unit.made_requests import made_request

# A step takes a tenth of a millisecond for its weights and a hundredth of one for each token.
COSTS = MixedStepCosts((16, 32, 64, 128), (0.26e-3, 0.42e-3, 0.74e-3, 1.38e-3))
LIMITS = Limits(8, 128, 4096, 0, 99)
NO_PATIENCE = Patience(0.0, 0.0)  # no prompt has time: the bound alone decides


def scheduler(max_ms: float, costs: MixedStepCosts = COSTS, patience: Patience = NO_PATIENCE) -> Scheduler:
    cache = CacheManager(make_layout((4, 0)), PagePool(4000), LIMITS, enable_prefix_caching=False)
    return Scheduler(cache, LIMITS, prompt_time=PromptTime(max_ms * 1e-3, costs, patience))


def request(index: int, prompt: int) -> Request:
    return Request(index, made_request([3] * prompt, SamplingParams(max_tokens=None)), prompt + 500)


def run_step(sched: Scheduler) -> dict[int, int]:
    """Tokens of each request in the next step, whose result is then known."""
    batch = sched.schedule()
    assert batch is not None
    sched.update(answer(batch))
    sched.check_integrity()
    return dict(zip(batch.request_ids, batch.num_known, strict=True))


def answer(batch: ScheduledBatch) -> StepResult:
    return StepResult(batch.step, [
        RequestResult(i, e, [5] if s else [], k, 0, 0)
        for i, e, s, k in zip(batch.request_ids, batch.epochs, batch.samples, batch.num_known, strict=True)
    ])


def decoding(sched: Scheduler, count: int) -> None:
    sched.add(*(request(index, 2) for index in range(count)))
    run_step(sched)


def test_prompts_that_nobody_waits_for_fill_the_step() -> None:
    sched = scheduler(max_ms=1.0)
    sched.add(request(0, 300))
    assert run_step(sched) == {0: 128} and run_step(sched) == {0: 128} and run_step(sched) == {0: 44}


@pytest.mark.parametrize(("max_ms", "tokens"), [(0.6, 32), (0.8, 64), (1.37, 64), (50.0, 128)])
def test_a_step_with_decoding_requests_stays_below_the_bound(max_ms: float, tokens: int) -> None:
    sched = scheduler(max_ms)
    decoding(sched, 3)
    sched.add(request(9, 300))
    assert run_step(sched) == {0: 1, 1: 1, 2: 1, 9: tokens - 3}, "it fills a captured size"


def test_a_long_context_makes_chunks_smaller() -> None:
    """Attention of a chunk grows with the tokens before it."""
    costs = MixedStepCosts(COSTS.tokens, COSTS.seconds, attending=(ReadCost(None, 2e-8), ReadCost(8, 1e-9)))
    sched = scheduler(1.9, costs)
    decoding(sched, 1)
    sched.add(request(9, 2000))
    chunks = []
    while (step := run_step(sched))[9] > 1:
        chunks.append(step[9])
    assert sum(chunks) == 2000 and chunks[:-1] == sorted(chunks[:-1], reverse=True) and chunks[0] > chunks[-2]
    context = 0
    for chunk in chunks[:-1]:
        assert costs.step(chunk + 1) + costs.attend(chunk, context) <= 1.9e-3
        context += chunk


def test_prompts_get_as_much_time_as_decoding_where_that_exceeds_the_bound() -> None:
    costs = MixedStepCosts(COSTS.tokens, COSTS.seconds, reading=(ReadCost(None, 1e-4),))
    sched = scheduler(0.1, costs)
    decoding(sched, 2)  # reads six tokens of context in the next step
    sched.add(request(9, 300))
    assert run_step(sched) == {0: 1, 1: 1, 9: 62}, "0.74 + 0.6 ms, where decoding takes 0.86"


def test_a_prompt_goes_on_when_its_attention_alone_exceeds_the_bound() -> None:
    costs = MixedStepCosts(COSTS.tokens, COSTS.seconds, attending=(ReadCost(None, 1.0),))
    sched = scheduler(0.1, costs)
    decoding(sched, 2)
    sched.add(request(9, 300), request(10, 300))
    assert run_step(sched) == {0: 1, 1: 1, 9: 16}


def test_prompts_share_the_time_of_one_step() -> None:
    """The second is admitted into what the first leaves; a third waits for the next step."""
    sched = scheduler(max_ms=1.4)
    decoding(sched, 1)
    sched.add(request(5, 40), request(6, 300), request(7, 300))
    assert run_step(sched) == {0: 1, 5: 40, 6: 87}
    assert sched.num_waiting == 1
    assert run_step(sched) == {0: 1, 5: 1, 6: 126}


@pytest.mark.parametrize("num_waiting", [1, 4, 30])
def test_steps_are_no_longer_where_many_prompts_wait(num_waiting: int) -> None:
    sched = scheduler(max_ms=0.6)
    decoding(sched, 1)
    sched.add(*(request(9 + index, 300) for index in range(num_waiting)))
    assert run_step(sched) == {0: 1, 9: 31}


# 32 tokens take a tenth longer than 16, so a step of 32 is a small one. It has 30 tokens of prompts beside 2 requests.
WEIGHTS_FIRST = MixedStepCosts((16, 32, 64, 128), (1.0e-3, 1.1e-3, 2.0e-3, 4.0e-3))


def patient(one_ms: float = 10.0, all_ms: float = 20.0) -> Scheduler:
    """A prompt has time if small steps compute it, and all others, so soon. Steps of 128 tokens keep the bound."""
    return scheduler(5.0, WEIGHTS_FIRST, Patience(one_ms * 1e-3, all_ms * 1e-3))


def test_a_prompt_that_has_time_is_computed_in_small_steps() -> None:
    sched = patient()
    decoding(sched, 2)
    sched.add(request(9, 250))
    chunks = [run_step(sched)[9] for _ in range(9)]
    assert chunks == [30] * 8 + [10], "nine steps take 9.9 ms"


def test_a_long_prompt_is_computed_at_the_bound_to_its_end() -> None:
    sched = patient()
    decoding(sched, 2)
    sched.add(request(9, 280))
    assert [run_step(sched)[9] for _ in range(3)] == [126, 126, 28]


def test_short_prompts_beside_a_long_one_are_computed_at_the_bound() -> None:
    sched = patient()
    decoding(sched, 2)
    sched.add(request(9, 30), request(10, 280))
    assert run_step(sched) == {0: 1, 1: 1, 9: 30, 10: 96}


def test_small_steps_begin_when_few_tokens_of_prompts_are_left() -> None:
    """20 ms are 527 tokens. Three prompts of 200 have more, until a step has taken some."""
    sched = patient()
    decoding(sched, 3)
    sched.add(*(request(9 + index, 200) for index in range(3)))
    assert run_step(sched) == {0: 1, 1: 1, 2: 1, 9: 125}
    assert run_step(sched) == {0: 1, 1: 1, 2: 1, 9: 29}


@pytest.mark.parametrize(("num_decoding", "tokens"), [(5, 27), (6, 26), (7, 121)])
def test_small_steps_have_a_share_of_prompts_for_each_request_that_decodes(num_decoding: int, tokens: int) -> None:
    """Four tokens each: otherwise prompts may arrive faster than small steps compute them."""
    sched = patient(one_ms=1000.0, all_ms=1000.0)
    decoding(sched, num_decoding)
    sched.add(request(9, 200))
    assert run_step(sched)[9] == tokens


def test_attention_to_a_context_does_not_shrink_small_steps() -> None:
    costs = MixedStepCosts(WEIGHTS_FIRST.tokens, WEIGHTS_FIRST.seconds, attending=(ReadCost(None, 1e-8),))
    sched = scheduler(5.0, costs, Patience(0.010, 0.020))
    decoding(sched, 2)
    sched.add(request(9, 250))
    assert [run_step(sched)[9] for _ in range(8)] == [30] * 8


@pytest.mark.parametrize("patience", [NO_PATIENCE, Patience(1e-3, 4e-3)])
@pytest.mark.parametrize("seed", range(10))
def test_bounds_hold_and_nobody_starves(seed: int, patience: Patience) -> None:
    """Requests come as they like. Whoever decodes gets a token in every step, prompts go on while rows are left, and
    steps that others wait for are as long as promised."""
    source = random.Random(seed)
    max_seconds = source.choice([0.1e-3, 0.3e-3, 0.6e-3])
    sched, lengths, computed = scheduler(max_seconds * 1e3, patience=patience), dict[int, int](), dict[int, int]()
    num_mixed = 0
    while len(lengths) < 60 or sched.num_waiting:
        for _ in range(source.choice([0, 0, 0, 0, 0, 0, 1, 2, 5]) if len(lengths) < 60 else 0):
            index = len(lengths)
            lengths[index], computed[index] = source.choice([3, 20, 30, 300]), 0
            sched.add(request(index, lengths[index]))
        if not sched.has_work:
            continue
        streams = [index for index in computed if computed[index] >= lengths[index]]
        prompts = [index for index in computed if computed[index] < lengths[index]]
        batch = sched.schedule()
        assert batch is not None
        sched.update(answer(batch))
        step = dict(zip(batch.request_ids, batch.num_known, strict=True))
        assert set(streams) <= set(step), "everyone who decodes has a token in each step"
        assert not prompts or len(streams) == LIMITS.max_requests or set(prompts) & set(step), "prompts go on"
        for index, num_tokens in step.items():
            computed[index] += num_tokens
        total = sum(step.values())
        if streams and total > len(streams) + COSTS.tokens[0]:  # more than the first chunk, which always goes on
            bounds = burst_bounds(LIMITS.max_requests - len(streams), len(streams), 0)  # at most; see below for fewer
            assert COSTS.step(total) <= bounds * max(max_seconds, 2 * COSTS.step(len(streams))) + 1e-9
            num_mixed += 1
        for index in streams:
            if source.random() < 0.3:
                sched.end(index, Finish.LENGTH)
                del computed[index]
    assert num_mixed > 0


@pytest.mark.parametrize(("prompts", "decoding", "established", "bounds"), [
    (15, 1, 0, 1), (12, 3, 0, 2), (6, 9, 0, 6), (30, 30, 0, 16), (40, 24, 0, 16),  # groups grow
    (40, 25, 0, 5), (500, 3, 0, 2), (100, 200, 0, 5),  # a large burst
    (12, 12, 6, 2), (12, 12, 11, 12 / 11), (200, 300, 20, 5), (64, 32, 16, 4),  # fewer established requests
])
def test_steps_of_a_burst_are_longer_the_more_requests_decode(
    prompts: int, decoding: int, established: int, bounds: float
) -> None:
    assert burst_bounds(prompts, decoding, established) == pytest.approx(bounds)


MANY = Limits(40, 2048, 4096, 0, 99)
MANY_SIZES = tuple(range(32, 2049, 32))
LINEAR = MixedStepCosts(MANY_SIZES, tuple(size * 1e-5 for size in MANY_SIZES))  # 32 tokens take 0.32 ms


class Crowd:
    """A scheduler whose steps are bounded to 1 ms, 96 tokens, where decoding takes less than half of it."""

    def __init__(self, limits: Limits = MANY) -> None:
        cache = CacheManager(make_layout((4, 0)), PagePool(4000), limits, enable_prefix_caching=False)
        self.sched = Scheduler(cache, limits, prompt_time=PromptTime(1e-3, LINEAR, NO_PATIENCE))
        self.count = 0

    def arrive(self, count: int, prompt: int = 64) -> None:
        self.sched.add(*(request(self.count + index, prompt) for index in range(count)))
        self.count += count

    def schedule(self) -> ScheduledBatch:
        batch = self.sched.schedule()
        assert batch is not None
        return batch

    def step(self) -> tuple[int, int]:
        """(requests that decode, tokens of prompts)"""
        batch = self.schedule()
        self.sched.update(answer(batch))
        decoding = sum(known == 1 for known in batch.num_known)
        return decoding, sum(batch.num_known) - decoding

    def first_of_a_burst(self, others: int, prompt: int = 64) -> None:
        """One request whose first token is being computed when the others arrive."""
        self.arrive(1)
        batch = self.schedule()
        self.arrive(others, prompt)
        self.sched.update(answer(batch))


def test_a_burst_is_computed_in_few_growing_steps() -> None:
    crowd = Crowd()
    crowd.first_of_a_burst(31)
    steps = []
    while crowd.sched.num_waiting:
        steps.append(crowd.step())
    assert [num for num, _ in steps] == sorted(num for num, _ in steps)
    tokens = [num for _, num in steps]
    assert tokens[0] == 95 and tokens[:-1] == sorted(tokens[:-1]) and max(tokens) > 5 * 96
    assert len(steps) < 10 < 31 * 64 / 96, "within the bound there would be two dozen"


def test_requests_that_decoded_before_a_burst_came_keep_the_bound() -> None:
    """The same requests, but the others arrive when the first has its token, and as many decode as wait."""
    crowd = Crowd()
    crowd.arrive(16)
    assert crowd.step() == (0, 16 * 64)
    crowd.arrive(16)
    while crowd.sched.num_waiting:
        decoding, tokens = crowd.step()
        assert decoding + tokens <= 96


def test_a_burst_onto_fewer_established_requests_gets_a_share_of_bounds() -> None:
    crowd = Crowd()
    crowd.arrive(6)
    crowd.step()
    crowd.arrive(18)
    assert crowd.step() == (6, 288 - 6), "three bounds: three prompts wait for each request that decodes"


def test_a_burst_is_over_after_a_step_without_prompts() -> None:
    crowd = Crowd()
    crowd.first_of_a_burst(11)
    while crowd.step()[1]:
        pass
    crowd.arrive(12)
    assert sum(crowd.step()) == 96


def test_requests_that_no_row_is_free_for_lengthen_no_step() -> None:
    crowd = Crowd(Limits(8, 2048, 4096, 0, 99))
    crowd.arrive(6)
    crowd.step()
    crowd.arrive(40, prompt=512)
    assert sum(crowd.step()) == 96, "two prompts can begin beside six requests that decode"


def established(burst: Burst, step: int, arrived_at: int) -> list[int]:
    """Requests that count as established beside a prompt, among those whose prompts were done in steps 0 to `step`."""
    decoding = [request(index, 2) for index in range(step)]
    for index, own in enumerate(decoding):
        own.prompt_done_at = index
    prompt = request(step, 9)
    prompt.arrived_at = arrived_at
    count = burst.num_established(decoding, PromptLine([prompt], WaitingRequests(), 0), step)
    return [own.id for own in decoding[:count]]


def test_requests_are_established_that_had_a_token_before_the_first_of_the_burst_came() -> None:
    burst = Burst()
    assert established(burst, step=6, arrived_at=4) == [0, 1, 2, 3]
    assert established(burst, step=7, arrived_at=6) == [0, 1, 2, 3], "prompts were in line ever since"
    assert established(burst, step=9, arrived_at=7) == [0, 1, 2, 3, 4, 5, 6], "step 8 had none"


def test_requests_of_a_burst_that_does_not_end_are_established_after_some_steps() -> None:
    burst = Burst()
    for step in range(ESTABLISHED_STEPS + 4):
        count = len(established(burst, step, arrived_at=0))
    assert count == 3
