"""What start-up made is left out of garbage collections while an engine lives, and belongs to them again afterwards."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from outrider import LLM
from tests.engine.harness import CONFIGS, greedy, prompt_of, save_folder
from tests.garbage import unfreeze


def use(model: str, *, closes: bool) -> None:
    llm = LLM(model, device="cpu", max_model_len=64, num_pages=16)
    assert gc.get_freeze_count() > 10_000
    llm.generate([prompt_of(1, 5)], greedy(3), use_tqdm=False)
    if closes:
        llm.close()
        assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "dropped"])
def test_the_heap_of_start_up_is_frozen_as_long_as_the_engine_lives(
    tmp_path: Path, is_closed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gc, "unfreeze", unfreeze)
    unfreeze()
    use(str(save_folder(tmp_path, CONFIGS["llama"], seed=3)), closes=is_closed)
    assert gc.get_freeze_count() == 0
