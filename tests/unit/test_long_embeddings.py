"""A long prompt of an embedding leaves room to short prompts, in every step, and is computed meanwhile."""

from __future__ import annotations

from collections import Counter

import pytest

from outrider.cache.manager import CacheManager
from outrider.cache.pages import PagePool
from outrider.core import Limits
from outrider.core.checked_request import CheckedRequest
from outrider.core.costs import MixedStepCosts, ReadCost
from outrider.pooling_params import PoolingParams
from outrider.sched.full_step import UNBOUNDED_PROMPTS, UnboundedPrompts
from outrider.sched.prompt_time import PromptTime
from outrider.sched.request import Request
from outrider.sched.scheduler import Scheduler
from tests.unit.hash_mixer import make_layout
from tests.unit.made_requests import made_request
from tests.unit.test_scheduler import result_of, scheduled, tokens_of

BUDGET, LONG = 512, 5000


def scheduler(prompt_time: UnboundedPrompts = UNBOUNDED_PROMPTS, max_requests: int = 16) -> Scheduler:
    limits = Limits(max_requests, BUDGET, 8192, 0, 99, steps_in_flight=2)
    cache = CacheManager(make_layout((16, 0)), PagePool(4000), limits, enable_prefix_caching=False)
    return Scheduler(cache, limits, prompt_time=prompt_time)


def embedding(index: int, length: int, priority: int = 0) -> Request:
    asked = CheckedRequest((index,) * length, PoolingParams(), priority=priority)
    return Request(index, asked, length + 1)


def text(index: int, length: int) -> Request:
    return Request(index, made_request([index] * length), length + 4)


def steps_until_computed(sched: Scheduler, lengths: dict[int, int], most: int = 60) -> dict[int, int]:
    """For each request the number of steps after which its whole prompt has been scheduled."""
    done: dict[int, int] = {}
    seen: Counter[int] = Counter()
    for step in range(1, most):
        batch = scheduled(sched)
        seen.update(tokens_of(batch))
        done |= {index: step for index, length in lengths.items() if seen[index] >= length and index not in done}
        if len(done) == len(lengths):
            return done
        sched.update(result_of(batch))
    raise AssertionError(f"not computed within {most} steps: {lengths.keys() - done.keys()}")


@pytest.mark.parametrize("make", [embedding, text])
def test_short_prompts_do_not_wait_for_a_long_embedding(make: type[Request]) -> None:
    sched = scheduler()
    sched.add(embedding(0, LONG))
    sched.update(result_of(scheduled(sched)))
    for index in range(1, 6):
        sched.add(make(index, 20))
    done = steps_until_computed(sched, {0: LONG - BUDGET, **dict.fromkeys(range(1, 6), 20)})
    assert all(done[index] == 1 for index in range(1, 6)) and done[0] <= 10


def test_a_long_embedding_goes_on_beside_any_number_of_short_ones() -> None:
    sched = scheduler()
    sched.add(embedding(0, LONG))
    tokens = 0
    for step in range(1, 30):
        for index in range(6):
            sched.add(embedding(100 * step + index, 100))  # more than a step has room for
        batch = scheduled(sched)
        tokens += tokens_of(batch).get(0, 0)
        assert batch.num_tokens == BUDGET, "no room is wasted"
        sched.update(result_of(batch))
        for index in batch.request_ids:
            if index:
                sched.end(index, result_of(batch).requests[0].finish)
        if tokens == LONG:
            break
    assert tokens == LONG and step <= 20


def test_without_short_prompts_a_long_one_takes_whole_steps() -> None:
    sched = scheduler()
    sched.add(embedding(0, LONG))
    sched.add(embedding(1, LONG))
    assert [tokens_of(scheduled(sched)) for _ in range(3)] == [{0: BUDGET}] * 3


def test_a_long_prompt_of_a_text_is_computed_as_before() -> None:
    sched = scheduler()
    sched.add(text(0, LONG), embedding(1, 20))
    assert tokens_of(scheduled(sched)) == {0: BUDGET}


def test_several_long_embeddings_hold_up_no_short_one_either() -> None:
    sched = scheduler()
    for index in range(12):
        sched.add(embedding(index, LONG))
    sched.add(embedding(12, 20))
    assert steps_until_computed(sched, {12: 20}) == {12: 1}


def test_short_prompts_that_matter_less_wait() -> None:
    sched = scheduler()
    sched.add(embedding(0, LONG))
    sched.add(embedding(1, 20, priority=1))
    assert tokens_of(scheduled(sched)) == {0: BUDGET}


def test_it_holds_in_steps_whose_time_is_bounded() -> None:
    costs = MixedStepCosts((64, 128, 256, 512), (1.0, 2.0, 4.0, 8.0), attending=(ReadCost(None, 0.0),))
    sched = scheduler(PromptTime(2.0, costs))
    sched.add(text(99, 4))
    sched.update(result_of(scheduled(sched)))  # from now on it decodes
    sched.add(embedding(0, LONG))
    sched.update(result_of(scheduled(sched)))
    sched.add(embedding(1, 20))
    batch = tokens_of(scheduled(sched))
    assert batch[1] == 20 and 0 < batch[0] < BUDGET
