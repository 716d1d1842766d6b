"""Kernels are compiled while weights are read: a worker that began with blank weights computes what any other does.

Only a GPU has kernels to compile; here workers on the CPU begin so, too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM
from outrider.config import EngineConfig
from outrider.models.sources.folder import FolderSource
from outrider.models.sources.model_source import WeightError
from outrider.runner import worker
from tests.drafters.checkpoints import make_drafter
from tests.engine.harness import CONFIGS, greedy, prompt_of, save_folder
from tests.models import gemma4
from tests.models.oracle import make_folder
from tests.models.test_hybrid_mtp import CASES, make_checkpoint

SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 64, "max_num_seqs": 3,
                            "num_pages": 64}


def with_eagle3(path: Path) -> tuple[Path, Any]:
    drafter = make_drafter("eagle3", "llama", path / "eagle3")
    return save_folder(path / "target", CONFIGS["llama"]), drafter.speculative(2)


def with_mtp(family: str) -> Callable[[Path], tuple[Path, Any]]:
    return lambda path: (make_checkpoint(family, CASES[family], path / family),
                         {"method": "mtp", "num_speculative_tokens": 2, "auto": False})


def with_assistant(path: Path) -> tuple[Path, Any]:
    name = next(iter(gemma4.TARGETS))
    assistant = gemma4.save_assistant(name, path / "assistant")
    return gemma4.save_target(name, path / "target"), {"method": "mtp", "model": str(assistant),
                                                       "num_speculative_tokens": 2, "auto": False}


CASES_OF_FOLDERS: dict[str, Callable[[Path], tuple[Path, Any]]] = {
    "norms with an offset": lambda path: (save_folder(path / "gemma3", CONFIGS["gemma3"]), None),
    "eagle3": with_eagle3,
    "states, mtp": with_mtp("nemotron_h"),
    "delta rule, mtp": with_mtp("qwen3_5"),
    "assistant": with_assistant,
    "latents, indexer": lambda path: (make_folder("deepseek_v32", path / "latent"), None),
}


def texts(folder: Path, speculative: Any) -> list[list[int]]:
    with LLM(str(folder), **SETTINGS, speculative_config=speculative) as llm:
        outputs = llm.generate([prompt_of(3, 20), prompt_of(4, 33)], greedy(12, ignore_eos=True))
        return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("case", CASES_OF_FOLDERS)
def test_tokens_are_those_of_a_worker_that_loads_first(case: str, tmp_path: Path,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    folder, speculative = CASES_OF_FOLDERS[case](tmp_path)
    expected = texts(folder, speculative)
    events: list[str] = []
    plan, fill = worker._plan_cache, worker.fill_target
    monkeypatch.setattr(worker, "_needs_no_weights", lambda *_: True)
    monkeypatch.setattr(worker, "_plan_cache", lambda *args: (events.append("planned"), plan(*args))[1])
    monkeypatch.setattr(worker, "fill_target", lambda *args: (events.append("filled"), fill(*args))[1])
    assert texts(folder, speculative) == expected
    assert events == ["planned", "filled"]


def test_weights_that_do_not_fit_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_folder(tmp_path / "llama", CONFIGS["llama"])
    monkeypatch.setattr(worker, "_needs_no_weights", lambda *_: True)
    monkeypatch.setattr(FolderSource, "read", lambda self: iter(()))
    with pytest.raises(WeightError, match="missing: lm_head.weight, model"):
        LLM(str(folder), **SETTINGS)


def test_who_may_begin_without_weights() -> None:
    def may(device: torch.device = torch.device("cuda"), method: Any = None) -> bool:  # noqa: B008
        speculative = None if method is None else {"method": method, "num_speculative_tokens": 2}
        return worker._needs_no_weights(EngineConfig("tiny", speculative_config=speculative), device)

    assert may() and may(method=["ngram", "mtp"])
    assert not may(device=torch.device("cpu")), "there are no kernels to compile"
    assert not may(method="my_package.drafters:Mine"), "it may look at the target's weights"
