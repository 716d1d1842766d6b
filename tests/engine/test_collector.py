"""What start-up made is left out of garbage collections while an engine lives, and belongs to them again afterwards. A
closed engine holds no weights and no cache."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM
from outrider.engine import collector
from outrider.engine.worker_line import EngineError
from outrider.layers import Linear, find_modules
from tests.drafters.checkpoints import make_drafter
from tests.engine.harness import CONFIGS, greedy, prompt_of, save_folder
from tests.garbage import unfreeze


def use(model: str, *, closes: bool) -> None:
    llm = LLM(model, device="cpu", max_model_len=64, num_pages=16)
    assert gc.get_freeze_count() > 10_000
    llm.generate([prompt_of(1, 5)], greedy(3), use_tqdm=False)
    if closes:
        llm.close()
        assert gc.get_freeze_count() == 0


def test_a_heap_stays_frozen_until_the_last_engine_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    class Engine:
        """Something that a weak reference can name."""

    monkeypatch.setattr(gc, "unfreeze", unfreeze)
    monkeypatch.setattr(collector, "_engines", set())
    first, second, never_frozen = Engine(), Engine(), Engine()
    for engine in (first, second):
        collector.freeze_heap(engine)
    for ended in (never_frozen, first, first):
        collector.unfreeze_heap(ended)
        assert gc.get_freeze_count() > 10_000
    del second, engine
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "dropped"])
def test_the_heap_of_start_up_is_frozen_as_long_as_the_engine_lives(
    tmp_path: Path, is_closed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gc, "unfreeze", unfreeze)
    monkeypatch.setattr(collector, "_engines", set())  # those of other tests
    unfreeze()
    use(str(save_folder(tmp_path, CONFIGS["llama"], seed=3)), closes=is_closed)
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("has_drafter", [False, True], ids=["plain", "eagle3"])
def test_a_closed_engine_that_is_still_referenced_holds_no_memory(
    tmp_path: Path, has_drafter: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gc, "unfreeze", unfreeze)
    monkeypatch.setattr(collector, "_engines", set())
    drafts = make_drafter("eagle3", "llama", tmp_path / "eagle3").speculative(2) if has_drafter else None
    folder = save_folder(tmp_path / "llama", CONFIGS["llama"], seed=3)
    with LLM(str(folder), device="cpu", max_model_len=64, num_pages=16, speculative_config=drafts) as llm:
        llm.generate([prompt_of(1, 5)], greedy(3), use_tqdm=False)
        worker: Any = llm.engine.runner
        step = worker.device_step
        linears = find_modules([step.model, *([] if step.drafter is None else step.drafter.modules())], Linear)
        tensors = [stored.tensor for linear in linears for stored in linear.format.tensors()]
        held = [weakref.ref(each) for each in (step.model, step.pool, step.pool.data, *tensors)]
        del step, linears, tensors
        monkeypatch.setattr("outrider.runner.worker.LARGE", 0)  # smaller ones wait for Python's next collection
    assert len(held) > 10 and not any(each() is not None for each in held)
    llm.close()  # once more
    with pytest.raises(EngineError, match="was closed"):
        llm.generate([prompt_of(1, 5)], greedy(3), use_tqdm=False)


def test_an_engine_with_work_runs_no_full_collection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generations: list[int] = []
    with LLM(str(save_folder(tmp_path, CONFIGS["llama"], seed=3)), device="cpu", max_model_len=64, num_pages=16) as llm:
        before = gc.get_threshold()
        gc.set_threshold(50, 2, 2)  # full collections nearly always

        def note(phase: str, info: dict[str, int]) -> None:
            if phase == "start" and llm.engine.has_work:
                generations.append(info["generation"])

        gc.callbacks.append(note)
        try:
            outputs = llm.generate([prompt_of(seed, 5) for seed in range(8)], greedy(30), use_tqdm=False)
            assert gc.get_threshold() == (50, 2, 2)  # the user's again
        finally:
            gc.callbacks.remove(note)
            gc.set_threshold(*before)
    assert len(outputs) == 8 and 2 not in generations


def test_the_thresholds_are_the_users_again_when_the_last_engine_rests_or_is_gone(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    class Engine:
        """Something that a weak reference can name."""

    thresholds, before = collector.WorkingThresholds(), gc.get_threshold()
    first, second = Engine(), Engine()
    try:
        for engine in (first, second, first):
            thresholds.begin(engine)
        thresholds.end(first)
        assert gc.get_threshold() == collector.BUSY_THRESHOLDS
        del second, engine
        assert gc.get_threshold() == before
        thresholds.begin(first)
        gc.set_threshold(123, 4, 5)  # by the user, meanwhile
        thresholds.end(first)
        assert gc.get_threshold() == (123, 4, 5)
        gc.set_threshold(0)  # the user collects
        thresholds.begin(first)
        assert gc.get_threshold()[0] == 0
        thresholds.end(first)
    finally:
        gc.set_threshold(*before)


def test_an_engine_that_is_always_busy_collects_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    class Engine:
        """Something that a weak reference can name."""

    thresholds, engine, collected, now = collector.WorkingThresholds(), Engine(), [], [1000.0]
    monkeypatch.setattr(collector.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(collector.gc, "collect", lambda: collected.append(now[0]))
    for _ in range(4 * int(collector.LONGEST_BUSY)):
        thresholds.begin(engine)
        now[0] += 1
    thresholds.end(engine)
    assert len(collected) == 3
