"""Trainers give weights under the names of transformers' modules: each finds its place, once, with its own values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.models.sources.model_source import WeightError
from outrider.runner.weight_update import UpdatedWeights, WeightStream, is_buffer
from tests.models import oracle

# Families whose modules in transformers hold a tensor that files hold in parts: an update of them is refused.
JOINED = ("kimi_linear", "kimi_linear_groups", "bailing_hybrid", "bailing_hybrid_free", "qwen4_exp",
          "qwen4_exp_sigmoid", "glm5_next", "glm5_next_free", "olmo_hybrid", "olmo_hybrid_rope")
QUICK = ("qwen3", "qwen3_moe", "mixtral", "deepseek_v3", "nemotron_h", "granite_hybrid", "kimi_linear")


@pytest.mark.parametrize("family", [pytest.param(family, marks=[] if family in QUICK else pytest.mark.long)
                                    for family in oracle.ALL])
def test_every_parameter_has_its_place(family: str, tmp_path: Path) -> None:
    folder = oracle.make_folder(family, tmp_path / "model")
    model, theirs = oracle.load(folder), oracle.hf_model(folder)
    before = {name: slot.target.clone() for name, slot in model.weights().items()}
    for name, slot in model.weights().items():
        if not is_buffer(name):
            slot.target.zero_()
    stream = WeightStream(UpdatedWeights(model, []))
    if family in JOINED:
        with pytest.raises(WeightError, match="no weight of this name: .*(conv1d|_hc|ngram_embedding)"):
            for name, parameter in theirs.named_parameters():
                stream.take(name, parameter.data, lambda: None)
        return
    for name, parameter in theirs.named_parameters():
        stream.take(name, parameter.data, lambda: None)
    assert not stream.missing(())
    assert stream.missing([name for name in before if is_buffer(name)]) == {
        name for name in before if is_buffer(name) and name not in stream.came}
    for name, slot in model.weights().items():
        assert torch.equal(slot.target, before[name]), name
