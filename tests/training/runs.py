"""Small training runs: targets of tests/assets, prompts in their languages, and settings that take seconds on a CPU."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from outrider.commands.loading import Loaded
from outrider.config import EngineConfig
from outrider.models.loader import load_model
from outrider.models.sources import resolve
from outrider.training.run import TrainedDrafter, train_drafter
from outrider.training.settings import TrainingSettings
from outrider.training.workspace import Workspace
from tests.assets import train_eagle3, train_gemma4, train_nemotronh
from tests.assets.training import Language

ASSETS = Path(__file__).parents[1] / "assets"
LANGUAGES: dict[str, Callable[[], Language]] = {
    "target": train_eagle3.language, "gemma4": train_gemma4.language, "nemotronh": train_nemotronh.language,
}
ENGINE: dict[str, Any] = {"device": "cpu", "num_pages": 300, "max_num_seqs": 32}
# Auxiliary states of models with four layers: the usual ones would be 2, 2 and 1.
SMALL: dict[str, Any] = {"max_prompt_tokens": 24, "max_answer_tokens": 32, "draft_vocab_size": 64, "taps": (1, 2, 4),
                         "batch_tokens": 512, "micro_tokens": 512, "save_seconds": 0}


@functools.cache
def loaded(name: str, dtype: torch.dtype = torch.float32) -> Loaded:
    return Loaded(name, load_model(resolve(ASSETS / name), dtype=dtype, device="cpu"), None, ())


def engine_config(name: str, **more: Any) -> EngineConfig:
    return EngineConfig(str(ASSETS / name), **(ENGINE | more))


def prompts_of(name: str, count: int, seed: int = 77) -> list[list[int]]:
    """Beginnings of texts in the target's language, of 8 to 15 tokens."""
    texts = LANGUAGES[name]().texts(count, 24, torch.Generator().manual_seed(seed)).tolist()
    return [text[: 8 + index % 8] for index, text in enumerate(texts)]


def write_prompts(path: Path, prompts: list[list[int]]) -> Path:
    path.write_text("".join(json.dumps({"prompt_token_ids": prompt}) + "\n" for prompt in prompts))
    return path


def train(folder: Path, name: str = "target", *, num_prompts: int = 24,
          report: Callable[[str], None] = lambda line: None, **settings: Any) -> TrainedDrafter:
    """A run in a folder, which a run before it may have left behind."""
    prompts = write_prompts(folder.with_name(folder.name + ".jsonl"), prompts_of(name, num_prompts))
    return train_drafter(loaded(name), engine_config(name), TrainingSettings(**(SMALL | settings)), Workspace(folder),
                         prompts_file=prompts, report=report)
