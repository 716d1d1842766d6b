"""`outrider bench costs`: the table of a tiny engine has every field that a simulation needs, and simulates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.benchmarks import costs, prompt_work, roofline
from outrider.benchmarks.costs import CostBench
from outrider.benchmarks.step_times import ObservedStep, Pace, TimedEngine
from outrider.config import EngineConfig
from outrider.core import ScheduledBatch
from outrider.core.costs import MixedStepCosts, ReadCost
from outrider.runner.graphs.chooser import LONG_QUIET
from outrider.runner.interface import BoundedSteps
from outrider.runner.worker import Worker
from outrider.simulation.cluster import Cluster
from outrider.simulation.cost_table import CostTable, HostCosts
from outrider.simulation.router import RoundRobin
from outrider.simulation.trace import ClosedLoad, FixedLength, Shapes
from tests.engine.harness import Rig, tiny_model

SETTINGS: dict[str, Any] = {"max_model_len": 256, "num_pages": 128, "poison": False}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 2, "rejection_sample_method": "synthetic",
          "synthetic_rates": [0.9, 0.5]}


def small_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "CPU_REQUESTS", (1, 2))
    monkeypatch.setattr(costs, "CPU_TOKENS", (8, 32))
    monkeypatch.setitem(costs.LONG_CONTEXTS, "cpu", (2, 64))
    monkeypatch.setattr(roofline, "CPU_BYTES", 1 << 20)
    monkeypatch.setattr(prompt_work, "CPU_SIZE", 64)


@pytest.mark.parametrize("speculative", [None, DRAFTS], ids=["plain", "drafts"])
def test_a_measured_table_simulates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                    speculative: dict[str, Any] | None) -> None:
    small_bench(monkeypatch)
    with Rig(tiny_model("gemma3", torch.float32), speculative_config=speculative, **SETTINGS) as rig:
        config = EngineConfig("tiny", speculative_config=speculative)
        said: list[str] = []
        table = CostBench(rig.engine, config, said.append).measure("tiny")
        assert isinstance(rig.engine.runner, Worker) and table.info == rig.engine.runner.info
    most = 0 if speculative is None else 2
    assert [(own.num_drafts, own.requests) for own in table.decoding] == [(k, (1, 2, 4)) for k in range(most + 1)]
    assert [own.tokens for own in table.prompts] == [(8, 32)] * len({0, most})
    assert table.acceptance == (() if speculative is None else (0.9, 0.5))
    assert table.model.num_layers == 3 and table.model.weight_bytes > 0 < table.model.token_operations
    assert {cost.window is None for cost in table.reading} == {True, False}
    table.save(tmp_path / "costs.json")
    again = CostTable.read(tmp_path / "costs.json")
    assert again == table and said
    load = ClosedLoad(Shapes(FixedLength(20), FixedLength(10), None, 0, 90), 8, 3)
    outcome = Cluster(again, 2, RoundRobin()).run(load)
    assert outcome.summary()["completed"] == 8


def test_steps_are_timed_as_the_engine_sees_them() -> None:
    batch = ScheduledBatch(0, [1], [0], [1], [1], [0], [True], [5])
    times = [(0.0, 1.0, 2.0), (1.0, 2.5, 4.0), (3.0, 4.5, 6.0)]
    assert Pace.from_steps([ObservedStep(batch, *own) for own in times]) == (2.0, 0.5)


def test_a_host_that_cannot_keep_up_is_not_taken_for_the_device() -> None:
    with Rig(tiny_model("llama", torch.float32), **SETTINGS) as rig:
        bench = CostBench(rig.engine, EngineConfig("tiny"), print)
        assert bench._device(Pace(5e-3, 1e-3), HostCosts(0.0, 0.0, latency=1e-3)) == 5e-3
        assert bench._device(Pace(5e-3, 5e-3), HostCosts(0.0, 0.0, latency=1e-3)) == pytest.approx(4e-3)


def test_a_gpu_is_measured_at_the_sizes_that_its_steps_are_padded_to() -> None:
    captured = MixedStepCosts((64, 192, 256, 2560), (1e-3, 2e-3, 3e-3, 20e-3))
    with Rig(tiny_model("llama", torch.float32), **SETTINGS) as rig:
        bench = CostBench(rig.engine, EngineConfig("tiny"), print)
        assert bench._captured_sizes == ()
        limits = replace(bench._limits, max_batched_tokens=1500, max_len=4096)
        bench._is_cuda, bench._info = True, replace(bench._info, limits=limits,
                                                    prompt_steps=BoundedSteps(12e-3, captured))
    assert bench._captured_sizes == (64, 192, 256)
    assert bench._prompt_sizes() == [64, 128, 192, 256, 512, 1024]


def test_prompts_are_measured_beside_requests_whose_contexts_take_many_steps() -> None:
    """The first of them still decode when the last begin."""
    with Rig(tiny_model("llama", torch.float32), **SETTINGS, max_num_batched_tokens=8) as rig:
        timed = TimedEngine(EngineConfig("tiny"), rig.engine.runner, 0)  # type: ignore[arg-type]
        assert timed.prompt_seconds([3], [120, 60, 60]).interval > 0


def test_an_engine_whose_requests_do_not_fit_together_is_refused() -> None:
    with Rig(tiny_model("llama", torch.float32), **(SETTINGS | {"num_pages": 18})) as rig:
        timed = TimedEngine(EngineConfig("tiny"), rig.engine.runner, 0)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"too small for the measured steps: it has 18 pages for all"):
            timed.decode_pace([timed.prompt(120) for _ in range(3)], 20)


def test_few_requests_have_longer_prompts() -> None:
    with Rig(tiny_model("llama", torch.float32), **(SETTINGS | {"max_num_seqs": 1})) as rig:
        bench = CostBench(rig.engine, EngineConfig("tiny"), print)
        timed = TimedEngine(EngineConfig("tiny"), rig.engine.runner, 0)  # type: ignore[arg-type]
        assert bench._short(64) == 64 and bench._prompt_seconds(timed, 64, 64) > 0


class RecordedEngine:
    """Stands in for an engine whose steps with prompts are timed: a step takes a microsecond for each request."""

    def __init__(self, num_drafts: int) -> None:
        self.num_drafts = num_drafts
        self.steps: list[tuple[int, int]] = []  # tokens and requests

    def prompt_seconds(self, lengths: list[int], contexts: list[int]) -> Pace:
        assert min(lengths) > 0
        self.steps.append((sum(lengths) + len(contexts) * (1 + self.num_drafts), len(lengths) + len(contexts)))
        return Pace(1e-6 * self.steps[-1][1], 0.0)


def test_a_size_without_a_graph_is_captured_before_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step runs on a wider graph; each call of `idle` captures one size."""
    with Rig(tiny_model("llama", torch.float32), **SETTINGS) as rig:
        bench, timed, left = CostBench(rig.engine, EngineConfig("tiny"), print), RecordedEngine(0), [1, 1]

        def idle(quiet_seconds: float) -> float | None:
            assert len(timed.steps) == 1 and quiet_seconds >= LONG_QUIET
            return 0.0 if left and left.pop() else None

        monkeypatch.setattr(rig.engine.runner, "idle", idle)
        bench._prompt_seconds(timed, 8, 33)  # type: ignore[arg-type]
        assert not left and len(timed.steps) == 1 + costs.REPEATS


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_steps_with_prompts_are_measured_in_every_number_of_requests_that_they_are_padded_to(num_drafts: int) -> None:
    captured = MixedStepCosts(tuple(range(64, 513, 64)), tuple(1e-3 * i for i in range(1, 9)))
    with Rig(tiny_model("llama", torch.float32), **SETTINGS) as rig:
        bench, timed = CostBench(rig.engine, EngineConfig("tiny"), print), RecordedEngine(num_drafts)
        limits = replace(bench._limits, max_requests=256, max_batched_tokens=8192, max_len=4096, max_drafts=num_drafts,
                         steps_in_flight=2)
        bench._is_cuda, bench._info = True, replace(bench._info, limits=limits,
                                                    prompt_steps=BoundedSteps(12e-3, captured))
        bench._info = replace(bench._info, num_pages=50_000)
        reading = (ReadCost(None, 1e-12), ReadCost(256, 1e-12))
        few, some, many = bench._prompts(timed, num_drafts, reading, ())  # type: ignore[arg-type]
        lone, *others = bench._contexts(1)
        assert lone > 256 and not others
    assert few.seconds[0] == pytest.approx(2e-6 - (lone + 256) * 1e-12), "what contexts take is told by `reading`"
    assert [own.requests for own in (few, some)] == [16, 64] and many.requests > 256
    assert few.tokens == (64, 128, 192, 256, 320, 384, 448, 512, 1024, 2048, 4096, 8192)
    assert some.tokens[-1] == many.tokens[-1] == 1024, "steps among many requests are bounded"
    counts = {size: {requests for tokens, requests in timed.steps if tokens == size} for size in some.tokens}
    for size, found in counts.items():
        assert any(16 < requests <= 64 for requests in found), size
    assert any(64 < requests <= 256 for requests in counts[1024])
    assert {tokens for tokens, _ in timed.steps} == {*few.tokens}, "a step has the tokens of its size"


def test_requests_decode_behind_contexts_of_many_lengths() -> None:
    with Rig(tiny_model("llama", torch.float32), **SETTINGS) as rig:
        bench = CostBench(rig.engine, EngineConfig("tiny"), print)
        assert bench._contexts(3) == [costs.SHORT_CONTEXT] * 3
        limits = replace(bench._limits, max_requests=256, max_len=4096)
        bench._is_cuda, bench._info = True, replace(bench._info, limits=limits, num_pages=50_000)
        few, many = bench._contexts(64), bench._contexts(256)
        assert sum(many) / 256 == pytest.approx(512, rel=0.02) and sum(few) / 64 == pytest.approx(512, rel=0.04)
        assert 1200 < few[0] < many[0] < 2048, "the longest of more requests is longer"
        assert all(mine <= other for mine, other in zip(few, many, strict=False)), "found in the prefix cache"
        reading = (ReadCost(None, 1e-12), ReadCost(300, 1e-12))
        assert bench._reading_seconds(reading, 64) == pytest.approx(1e-12 * sum(own + min(own, 300) for own in few))
        bench._info = replace(bench._info, limits=replace(limits, max_len=64), num_pages=300)
        assert 1 <= min(bench._contexts(256)) <= max(bench._contexts(256)) <= 32


def test_a_disturbed_step_does_not_make_larger_ones_slower() -> None:
    assert costs.rising([3.0, 9.0, 4.0, 6.0]) == (3.0, 4.0, 4.0, 6.0)


def test_contexts_are_read_in_two_parts() -> None:
    """The first tokens of a context cost more each; windows have no more tokens than they see."""
    found = costs.reading_costs({None: 100, 128: 10}, first=3e-9, later=2e-9)
    assert {cost.window: round(cost.seconds * 1e9) for cost in found} == {None: 200, 512: 100, 128: 30}
    for length, expected in ((100, 100 * 330), (512, 512 * 300 + 128 * 30), (1000, 512 * 300 + 488 * 200 + 128 * 30)):
        seconds = sum(cost.seconds * min(length, cost.window or length) for cost in found)
        assert seconds == pytest.approx(expected * 1e-9)
    assert {cost.seconds for cost in costs.reading_costs({None: 1}, 2.0, 3.0)} == {2.0, 0.0}, "noise"
