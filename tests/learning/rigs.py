"""Engines around the small trained target of tests/assets whose EAGLE-3 head learns while it serves, and a naive
reference of the target's residual streams."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outrider.engine.engine import Engine
from outrider.features.learning.learner import DrafterLearner
from outrider.features.learning.report import AdaptationReport
from outrider.models.base import Model
from outrider.models.loader import load_model
from outrider.models.sources import resolve
from tests.assets.train_eagle3 import MODES, TAPS, language, target_forward
from tests.drafters.rig import DraftRig
from tests.engine.harness import Rig

ASSETS = Path(__file__).parents[1] / "assets"
NUM_DRAFTS = 3
SPECULATIVE: dict[str, Any] = {
    "method": "eagle3", "model": str(ASSETS / "eagle3"), "num_speculative_tokens": NUM_DRAFTS, "auto": False,
}
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 16, "max_num_batched_tokens": 256, "max_model_len": 96, "num_pages": 160,
    "speculative_config": SPECULATIVE, "adapt_drafter": True, "adapt_share": 1.0, "adapt_memory_bytes": 64 << 20,
}


@functools.cache
def target(dtype: torch.dtype = torch.float64) -> Model:
    return load_model(resolve(ASSETS / "target"), dtype=dtype, device="cpu")


def learning_rig(model: Model | None = None, **settings: Any) -> DraftRig:
    return DraftRig(model or target(), **SETTINGS | settings)


def learner_of(rig: Rig) -> DrafterLearner:
    (learner,) = rig.step.drafting._observers
    assert isinstance(learner, DrafterLearner)
    return learner


def report_of(engine: Engine) -> AdaptationReport | None:
    """The last report that the engine has."""
    report = engine.reports.get(AdaptationReport)
    assert report is None or isinstance(report, AdaptationReport)
    return report


def without_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test calls the trainer, whose offers are taken at once: nothing depends on the machine's speed."""
    monkeypatch.setattr(DrafterLearner, "start", lambda self: None)
    monkeypatch.setattr(DrafterLearner, "_offer_weights", lambda self: self._swap())


def prompts(count: int, seed: int) -> list[list[int]]:
    """Beginnings of texts in the language that the head was trained on."""
    texts = language().texts(count, 24, torch.Generator().manual_seed(seed)).tolist()
    return [text[: 8 + index % 8] for index, text in enumerate(texts)]


def shifted_prompts(count: int, seed: int) -> list[list[int]]:
    """Names of modes alone, which no text of the language has: the head has never seen what the target says then."""
    return torch.randint(MODES, (count, 7), generator=torch.Generator().manual_seed(seed)).tolist()


@functools.cache
def _weights() -> dict[str, torch.Tensor]:
    return {name: tensor.double() for name, tensor in load_file(ASSETS / "target" / "model.safetensors").items()}


def naive_aux_states(text: list[int]) -> torch.Tensor:
    """[length, taps, hidden] by plain torch, without an engine."""
    _, streams = target_forward(_weights(), torch.tensor([text]))
    return torch.stack([streams[tap][0] for tap in TAPS], dim=1)
