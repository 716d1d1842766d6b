"""Late results, kills in between and other processes change no token.

Nothing of a step in flight can reach `schedule()` here: the delayed runner computes a step only after the later ones
have been scheduled.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from outrider.core import ScheduledBatch
from outrider.core.params import SamplingParams
from tests.engine.harness import CONFIGS, SETTINGS, Ask, Rig, add_request, greedy, prompt_of, tiny_model, tokens_of
from tests.engine.runners import DelayedRunner, PicklingRunner, ProcessRunner

LENGTH = 12
# Requests that stop on the device, at a token the host learns of late, among those that run to their end.
STOPS = list(range(3, 40))
ASKS = [
    Ask(prompt_of(1, 21), greedy(LENGTH)),
    Ask(prompt_of(2, 40), SamplingParams(seed=1, max_tokens=LENGTH, stop_token_ids=STOPS)),
    Ask(prompt_of(3, 3), SamplingParams(seed=2, max_tokens=LENGTH, stop_token_ids=STOPS, repetition_penalty=1.2)),
    Ask(prompt_of(4, 17), SamplingParams(seed=3, max_tokens=LENGTH, top_p=0.8)),
    Ask(prompt_of(5, 30), SamplingParams(seed=4, max_tokens=LENGTH, stop_token_ids=STOPS)),
]
SMALL = {"max_num_seqs": 3, "max_num_batched_tokens": 16}


@pytest.fixture(scope="module", params=CONFIGS)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def expected(family: str) -> list[list[list[int]]]:
    with Rig(tiny_model(family), max_num_seqs=1, overlap=False) as rig:
        tokens = tokens_of(rig.run_one_by_one(ASKS))
    assert any(len(sample) < LENGTH for (sample,) in tokens), "some request should stop early"
    return tokens


def delayed(rig: Rig, delay: int) -> DelayedRunner:
    runner = DelayedRunner(rig.runner, delay)
    rig.engine.worker.runner = runner
    return runner


@pytest.mark.parametrize("delay", [1, 2])
def test_late_results_change_nothing(family: str, expected: list[list[list[int]]], delay: int) -> None:
    with Rig(tiny_model(family), depth=delay + 1, **SMALL) as rig:
        runner = delayed(rig, delay)
        assert tokens_of(rig.run(ASKS)) == expected
        assert max(runner.lags) == delay and runner.lags.count(delay) > len(runner.lags) // 2
        assert rig.scheduler.stats.max_steps_in_flight == delay + 1
        assert rig.scheduler.stats.num_dropped_results > 0, "the host ran ahead of a request that had stopped"


@pytest.mark.parametrize("delay", [1, 2])
def test_preempting_between_steps_drops_stale_results(family: str, expected: list[list[list[int]]], delay: int) -> None:
    with Rig(tiny_model(family), depth=delay + 1, **SMALL) as rig:
        delayed(rig, delay)
        assert tokens_of(rig.run(ASKS, after_step=rig.preempt)) == expected
        assert rig.scheduler.stats.num_preemptions > 0
        assert rig.scheduler.stats.num_dropped_results >= delay * rig.scheduler.stats.num_preemptions


@pytest.mark.parametrize("delay", [0, pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize("kill_at", [0, 1, 4, pytest.param(2, marks=pytest.mark.long), 7])
def test_kills_between_steps_harm_nobody_else(
    family: str, expected: list[list[list[int]]], delay: int, kill_at: int
) -> None:
    """Requests are aborted at every age: waiting, in their prompt, yielding, with steps in flight."""
    killed = (0, 4)
    with Rig(tiny_model(family), depth=delay + 1, **SMALL) as rig:
        delayed(rig, delay)
        steps = itertools.count()

        def kill() -> None:
            if next(steps) == kill_at:
                for index in killed:
                    rig.engine.abort(str(index))
                rig.scheduler.check_integrity()

        outputs = rig.run(ASKS, after_step=kill)
    for index, output in enumerate(outputs):
        (sample,) = output.outputs
        if index in killed:
            assert sample.finish_reason == "abort"
            assert sample.token_ids == expected[index][0][: len(sample.token_ids)]
        else:
            assert sample.token_ids == expected[index][0]


def test_pages_and_rows_of_the_dead_go_to_the_living(family: str, expected: list[list[list[int]]]) -> None:
    """A request is killed with steps in flight and its row and pages are taken at once."""
    with Rig(tiny_model(family), depth=3, max_num_seqs=1, num_pages=13, max_num_batched_tokens=16) as rig:
        runner = delayed(rig, 2)
        for _ in range(6):
            add_request(rig.engine, "dead", ASKS[1].prompt, ASKS[1].params)
            for _ in range(4):
                rig.engine.step()
            assert runner.lags == [] or rig.scheduler._in_flight
            rig.engine.abort("dead")
            rig.engine.step()
        assert tokens_of(rig.run(ASKS[:1])) == expected[:1]
        rows = {row for batch in rig.batches for row in batch.rows}
        assert rows == {1}


def test_batches_and_results_pass_through_pickle(family: str, expected: list[list[list[int]]]) -> None:
    with Rig(tiny_model(family), **SMALL) as rig:
        rig.engine.worker.runner = PicklingRunner(rig.runner)
        assert tokens_of(rig.run(ASKS)) == expected
        assert rig.scheduler.stats.max_steps_in_flight == 2


def test_a_runner_in_another_process() -> None:
    model = tiny_model("gemma3")
    asks = [*ASKS, Ask(prompt_of(9, 11), greedy(5, logprobs=3, prompt_logprobs=2))]
    with Rig(model, overlap=False) as near:
        here = near.run(asks)
    with Rig(model) as far:
        far.engine.worker.runner = ProcessRunner("gemma3", SETTINGS)
        there = far.run(asks)
        assert far.scheduler.stats.max_steps_in_flight == 2
    assert tokens_of(there) == tokens_of(here)
    assert there[-1].outputs[0].logprobs is not None and len(there[-1].outputs[0].logprobs) == 5
    assert [sorted(entry) for entry in there[-1].prompt_logprobs[1:]] == [  # type: ignore[index, type-var]
        sorted(entry) for entry in here[-1].prompt_logprobs[1:]  # type: ignore[index, type-var]
    ]


def test_a_step_that_dies_once_ends_nobody(family: str, expected: list[list[list[int]]]) -> None:
    """What a row holds after half a step is unknown, so those with a row begin again from their settled tokens."""
    with Rig(tiny_model(family), **SMALL) as rig:
        rig.runner._before_step = fail_at(rig, 4)
        assert tokens_of(rig.run(ASKS)) == expected
        assert rig.scheduler.generation == 1
        assert tokens_of(rig.run(ASKS)) == expected, "and the engine is as good as new"


def fail_at(rig: Rig, step: int) -> Callable[[ScheduledBatch], None]:
    before = rig.runner._before_step
    assert before is not None

    def hook(batch: ScheduledBatch) -> None:
        if batch.step == step:
            raise RuntimeError("no more memory")
        before(batch)

    return hook
