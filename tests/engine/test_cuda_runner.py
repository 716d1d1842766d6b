"""The runner of captured steps, on the CPU: a graph runs its step again there, and writes over the result that it was
captured with, as a replay does."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch

from outrider.core import SamplingParams, ScheduledBatch
from outrider.runner.graphs import captures, cuda_runner, losses
from outrider.runner.graphs.chooser import Launch, Replay, RunEagerly, StepChoice
from outrider.runner.graphs.cuda_runner import CudaRunner
from outrider.runner.graphs.losses import LossRates
from tests.engine.harness import Ask, Rig, greedy, prompt_of, tiny_model, tokens_of

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "auto": False}
SETTINGS: dict[str, Any] = {"max_num_seqs": 40, "max_num_batched_tokens": 400, "poison": False, "overlap": False,
                            "enable_prefix_caching": False}
ASKS = [Ask(prompt_of(i, 4 + 5 * (i % 4)), greedy(5, ignore_eos=True) if i % 2 else
            SamplingParams(temperature=0.8, seed=i, max_tokens=4, ignore_eos=True)) for i in range(20)]
ROUNDS = [ASKS, ASKS, [Ask(prompt_of(99, 7), greedy(3, logprobs=1))]]
TIMES = LossRates(launch_seconds=300e-6, token_seconds=1e-6)


class _Graph:
    run: Callable[[], Any]
    result: Any

    def replay(self) -> None:
        with torch.inference_mode():
            _copy(self.result, self.run())


class _Event:
    def __init__(self, **options: Any) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: _Event) -> float:
        return 5.0  # milliseconds


def _copy(target: Any, source: Any) -> None:
    if isinstance(target, torch.Tensor):
        target.copy_(source)
    elif is_dataclass(target):
        for field in fields(target):
            _copy(getattr(target, field.name), getattr(source, field.name))


def _record(graphs: Any, graph: _Graph, run: Callable[[], Any]) -> Any:
    graph.run, graph.result = run, run()
    return graph.result


@pytest.fixture(autouse=True)
def no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", _Graph)
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    for name in ("graph_pool_handle", "Stream", "empty_cache", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *args: None)
    monkeypatch.setattr(captures.StepGraphs, "_record", _record)
    monkeypatch.setattr(cuda_runner, "_to_pinned", torch.clone)
    monkeypatch.setattr(cuda_runner, "can_capture", lambda layout, backend: True)
    for constant in ("PATIENCE", "DECODE_PATIENCE", "PAUSE"):
        monkeypatch.setattr(losses, constant, 0.0)


def captured_runner(rig: Rig) -> CudaRunner:
    runner = CudaRunner(rig.step, rig.engine.limits)
    runner.capture_decoding()
    runner.capture_prompts()
    runner.chooser.losses.times = TIMES
    rig.engine.worker.runner = runner
    return runner


def run_all(rig: Rig) -> list[list[list[list[int]]]]:
    return [tokens_of(rig.run(asks)) for asks in ROUNDS]


def test_another_rank_gives_the_same_tokens_by_the_choices_it_is_sent() -> None:
    """The rank that chooses captures what it meets. The other rank has memory for no more than start-up captured: it
    launches what the first one replays."""
    sent, kinds, orders = list[bytes](), set[type](), set[str]()
    with Rig(tiny_model("llama"), speculative_config=NGRAM, **SETTINGS) as rig:
        expected = run_all(rig)
        local, runner = rig.runner, captured_runner(rig)
        num_at_start, carry_out = len(runner.graphs.captured), runner._carry_out  # type: ignore[union-attr]

        def watched(batch: ScheduledBatch, choice: StepChoice, graphs: Any) -> Any:
            sent.append(pickle.dumps(choice))
            kinds.add(type(choice))
            orders.update(name for name in ("before", "behind") if getattr(choice, name, None) is not None)
            return carry_out(batch, choice, graphs)

        runner._carry_out = watched  # type: ignore[method-assign]
        assert run_all(rig) == expected
        rig.engine.worker.runner = local
    assert kinds == {Replay, Launch, RunEagerly} and orders == {"before", "behind"}
    assert len(runner.graphs.captured) > num_at_start  # type: ignore[union-attr]
    with Rig(tiny_model("llama"), speculative_config=NGRAM, **SETTINGS) as rig:
        local, runner, choices = rig.runner, captured_runner(rig), iter(sent)
        follow(runner, choices)
        assert run_all(rig) == expected
        rig.engine.worker.runner = local
    assert next(choices, None) is None and len(runner.graphs.captured) == num_at_start  # type: ignore[union-attr]


def follow(runner: CudaRunner, choices: Iterator[bytes]) -> None:
    """The runner runs by choices that were sent, and has no memory for captures."""
    graphs: Any = runner.graphs

    def no_memory(key: Any) -> None:
        raise torch.OutOfMemoryError

    graphs.capture = no_memory
    runner._run = lambda batch: runner._carry_out(batch, pickle.loads(next(choices)), graphs)  # type: ignore


def test_captures_while_idle_and_after_a_drop_change_no_token() -> None:
    with Rig(tiny_model("llama"), speculative_config=NGRAM, **SETTINGS) as rig:
        expected = run_all(rig)
        local, runner = rig.runner, captured_runner(rig)
        graphs: Any = runner.graphs
        num_at_start = len(graphs.captured)
        while runner.idle(1.0) is not None:
            pass
        assert len(graphs.captured) > num_at_start and run_all(rig) == expected
        held = list(graphs.captured)
        graphs.drop()
        assert not graphs.captured and runner.capture_again() == len(held) and list(graphs.captured) == held
        assert run_all(rig) == expected
        rig.engine.worker.runner = local
