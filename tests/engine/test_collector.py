"""What start-up made is left out of garbage collections while an engine lives, and belongs to them again afterwards."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from outrider import LLM
from outrider.engine import collector
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
