"""A step in two halves gives what it gives whole, captured or not, and the host has its turn between them: when the
forward is queued, and before anything is sampled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from outrider.core import ScheduledBatch, StepForm, Uncaptured
from outrider.core.params import SamplingParams
from outrider.runner.step import DeviceStep
from tests.engine.captured import AsCaptured
from tests.engine.harness import Ask, Rig, greedy, prompt_of, tiny_model, tokens_of

NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1, "auto": False}
ASKS = [
    Ask([5, 6, 7, 8] * 6, greedy(9)),
    Ask(prompt_of(2, 17), SamplingParams(temperature=1.0, seed=4, max_tokens=8)),
    Ask(prompt_of(3, 5), greedy(6, logprobs=2)),
]
SETTINGS: dict[str, Any] = {"max_num_batched_tokens": 24, "overlap": True, "speculative_config": NGRAM}


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_split_steps_give_the_same_tokens(family: str) -> None:
    with Rig(tiny_model(family), **SETTINGS) as rig:
        wanted = tokens_of(rig.run(ASKS))
        assert all(result.uncaptured is Uncaptured.NO_GRAPHS for result in rig.results)
    for form in StepForm:
        with Rig(tiny_model(family), **SETTINGS) as rig:
            captured = AsCaptured(rig, form=form)
            assert tokens_of(rig.run(ASKS)) == wanted
            assert captured.met and all(key.form is form for key in captured.met)
            assert captured.reasons[Uncaptured.SAMPLING_PARAMETERS] > 0, "logprobs: some steps are served by no graph"
            assert captured.turns == ([batch.step for batch in rig.batches] if form is StepForm.SPLIT else [])


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_steps_on_wider_graphs_give_the_same_tokens(family: str) -> None:
    """Graphs of start-up serve the steps of a new size, prompts and all, and its own serves them from some step on."""
    settings = SETTINGS | {"max_num_batched_tokens": 300, "max_num_seqs": 40}
    asks = [Ask([5, 6, 7, 8] * 6, greedy(9)), *(Ask(prompt_of(seed, 2 * seed), greedy(9)) for seed in range(1, 21))]
    with Rig(tiny_model(family), **settings) as rig:
        wanted = tokens_of(rig.run(asks))
    with Rig(tiny_model(family), **settings) as rig:
        captured = AsCaptured(rig, stands_in=True)
        assert tokens_of(rig.run(asks)) == wanted
        assert {key.has_prompts for key in captured.wider} == {False, True}


def test_the_host_acts_between_forward_and_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its turn sees the rows as the step before left them, and what it writes there counts."""
    order: list[str] = []
    forward, finish = DeviceStep.forward_half, DeviceStep.finish_half

    def watched_forward(self: DeviceStep, *args: Any) -> Any:
        order.append("forward")
        return forward(self, *args)

    def watched_finish(self: DeviceStep, *args: Any) -> Any:
        order.append("finish")
        return finish(self, *args)

    monkeypatch.setattr(DeviceStep, "forward_half", watched_forward)
    monkeypatch.setattr(DeviceStep, "finish_half", watched_finish)
    with Rig(tiny_model("llama"), overlap=False) as rig:
        run = rig.runner._run

        def turn(batch: ScheduledBatch) -> None:
            order.append("host")
            rig.step.state.sampling.stop_ids[batch.rows[0], 0] = int(expected[2])
            rig.step.state.sampling.num_stop_ids[batch.rows[0]] = torch.tensor(1)

        rig.step.host_turn = turn  # type: ignore[method-assign]
        ((expected,),) = tokens_of(rig.run([Ask(prompt_of(1, 9), greedy(8))]))
        assert order == ["forward", "finish"] * len(rig.batches), "no turn in a whole step"
        order.clear()
        rig.runner._run = lambda batch, packed: run(  # type: ignore[method-assign]
            replace(batch, mode=batch.mode._replace(form=StepForm.SPLIT)), packed)
        ((cut,),) = tokens_of(rig.run([Ask(prompt_of(1, 9), greedy(8))]))
    assert order == ["forward", "host", "finish"] * (len(order) // 3)
    assert cut == expected[: expected.index(expected[2]) + 1], "the id that the host wrote ends the request"
