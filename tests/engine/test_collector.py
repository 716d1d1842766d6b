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
from outrider.engine.engine import EngineError
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
