"""The small trained Gemma 4 with its assistant, prompts in its language, and what drafting makes of them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from outrider.models.base import Model
from outrider.models.loader import load_model
from outrider.models.sources import resolve
from tests.assets.train_gemma4 import language
from tests.drafters.rig import DraftRig
from tests.engine.harness import Ask, Rig, greedy

ASSETS = Path(__file__).parents[1] / "assets"
ASSISTANT = ASSETS / "gemma4_assistant"
DRAFTS, WINDOW = 3, 8
SPECULATIVE: dict[str, Any] = {
    "method": "mtp", "model": str(ASSISTANT), "num_speculative_tokens": DRAFTS, "auto": False,
}


@functools.cache
def trained_target() -> Model:
    return load_model(resolve(ASSETS / "gemma4"), dtype=torch.float64, device="cpu")


def trained_rig(**settings: Any) -> DraftRig:
    values: dict[str, Any] = {"speculative_config": SPECULATIVE, "max_model_len": 128, "num_pages": 300}
    return DraftRig(trained_target(), **values | {"max_num_seqs": 8} | settings)


def trained_prompts(seed: int, lengths: tuple[int, ...]) -> list[list[int]]:
    texts = language().texts(len(lengths), max(lengths), torch.Generator().manual_seed(seed))
    return [text[:length].tolist() for text, length in zip(texts, lengths, strict=True)]


def trained_asks(seed: int, lengths: tuple[int, ...], max_tokens: int) -> list[Ask]:
    return [Ask(prompt, greedy(max_tokens)) for prompt in trained_prompts(seed, lengths)]


def runs_of(rig: Rig) -> list[int]:
    """The lengths of all runs that drafts could have made longer."""
    return [len(part.run) for result in rig.results for part in result.requests if part.num_drafted > 0]


def mean_run(rig: Rig) -> float:
    runs = runs_of(rig)
    assert len(runs) > 100
    return sum(runs) / len(runs)


def accepted_counts(rig: Rig) -> set[int]:
    return {part.num_accepted for result in rig.results for part in result.requests if part.num_drafted == DRAFTS}
