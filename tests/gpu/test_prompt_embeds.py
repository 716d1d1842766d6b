"""Embeddings in place of token ids, on the card: in steps that run uncaptured between captured ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from outrider.core import Uncaptured
from tests.gpu.conftest import HAS_CARD
from tests.gpu.rig import DEVICE, GpuRig, asks, assert_same_tokens, loaded, reference
from tests.gpu.test_engines import DRAFTERS, folder_of


@pytest.mark.parametrize(("family", "drafter"), [
    pytest.param("llama", "ngram", marks=pytest.mark.together("llama")),
    pytest.param("deepseek_v3", "mtp", marks=pytest.mark.together("deepseek_v3")),
])
def test_tokens_are_those_of_the_ids(family: str, drafter: str) -> None:
    folder = folder_of(family)
    model = loaded(folder)
    asked = [ask if index % 2 else replace(ask, embeds=model.embed_tokens.look_up(  # type: ignore[attr-defined]
        torch.tensor(ask.prompt, device=DEVICE))) for index, ask in enumerate(asks())]
    with GpuRig(model, source=folder, speculative_config=DRAFTERS[drafter](family)) as rig:
        for _ in range(2):
            assert_same_tokens(rig.run(asked), reference(folder), asks())
        if HAS_CARD:
            assert rig.runner.num_replays > 0
            assert rig.engine.stats.uncaptured[Uncaptured.PROMPT_EMBEDS] > 0
