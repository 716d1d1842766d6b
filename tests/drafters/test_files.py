"""A drafter is known by its files, and what is wrong with it is said before a weight of the target is read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM
from outrider.config import SpeculativeConfig
from outrider.drafters import registry
from outrider.drafters.base import DraftBuild
from outrider.drafters.files import method_of, with_method
from outrider.models.registry import build_model
from outrider.models.sources import ModelSource, resolve
from outrider.models.sources.folder import FolderSource
from tests.drafters.checkpoints import KINDS, make_drafter
from tests.engine.harness import CONFIGS, save_folder, tiny_model

ASSETS = Path(__file__).parents[1] / "assets"
NEMOTRON = {"architectures": ["NemotronHForCausalLM"], "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
            "hybrid_override_pattern": "M-*-", "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 8,
            "n_groups": 2}


def build_for(target: str | None = None) -> DraftBuild:
    return DraftBuild(tiny_model("llama"), torch.float64, torch.device("cpu"), 64, target_source=target)


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_is_known_by_its_files_wherever_they_lie(kind: str, tmp_path: Path) -> None:
    drafter = make_drafter(kind, "llama", tmp_path / "eagle3-team" / "assistant-mtp")
    given = SpeculativeConfig.parse({"model": str(drafter.folder), "num_speculative_tokens": 2})
    assert with_method(given, build_for()).method == drafter.method


def test_an_assistant_is_known_by_its_config() -> None:
    source = resolve(ASSETS / "gemma4_assistant")
    assert method_of(source, has_tensors=False, is_target=False) == "gemma4_assistant"
    given = SpeculativeConfig.parse({"method": "mtp", "model": str(source.path), "num_speculative_tokens": 2})
    assert with_method(given, build_for()).method == "gemma4_assistant"  # the name that vLLM has for it


def test_a_whole_model_with_a_module_drafts_as_a_model_unless_it_is_the_target(tmp_path: Path) -> None:
    class Files(FolderSource):
        def tensor_names(self) -> set[str]:
            return {"model.layers.0.mlp.up_proj.weight", "mtp.fc.weight"}

    source = Files("small", tmp_path, {"architectures": ["LlamaForCausalLM"]}, ())
    assert method_of(source, has_tensors=True, is_target=False) == "draft_model"
    assert method_of(source, has_tensors=True, is_target=True) == "mtp"
    folder = save_folder(tmp_path, CONFIGS["llama"])
    given = SpeculativeConfig.parse({"model": str(folder), "num_speculative_tokens": 2})
    assert with_method(given, build_for(f"{tmp_path}/.")).method == "mtp"


def test_a_drafter_of_another_kind_is_refused_by_its_config(tmp_path: Path) -> None:
    source = FolderSource("x", tmp_path, {"speculators_model_type": "medusa"}, ())
    with pytest.raises(ValueError, match="config.json: speculators_model_type='medusa' is not supported; supported"):
        method_of(source, has_tensors=False, is_target=False)


@pytest.mark.parametrize(("config", "kind"), [
    ({"model_type": "mlp_speculator"}, "an MLP speculator"), ({"architectures": ["MedusaModel"]}, "a Medusa head"),
    ({"architectures": ["MLPSpeculatorPreTrainedModel"]}, "an MLP speculator"),
])
def test_a_drafter_of_a_kind_that_is_not_served_is_refused_by_that_name(tmp_path: Path, config: dict[str, Any],
                                                                        kind: str) -> None:
    with pytest.raises(ValueError, match=f"^speculative_config: x is {kind}, which is not served: take an EAGLE head"):
        method_of(FolderSource("x", tmp_path, config, ()), has_tensors=False, is_target=False)
    with pytest.raises(ValueError, match="MLP speculators .mlpspeculator., whose files have it, are not supported"):
        SpeculativeConfig.parse({"model": "x"})


def outline(config: dict[str, Any], source: str = "config.json") -> DraftBuild:
    meta = torch.device("meta")
    return DraftBuild(build_model(config, dtype=torch.float32, device=meta, source=source), torch.float32, meta, 1)


@pytest.mark.parametrize("changes", [{}, {"num_nextn_predict_layers": 0}])
def test_a_checkpoint_without_a_module_says_so(changes: dict[str, Any]) -> None:
    config = SpeculativeConfig.parse({"method": "mtp", "num_speculative_tokens": 1})
    with pytest.raises(ValueError, match="^/m/config.json: .*no multi-token-prediction module. Choose another method"):
        registry.make_drafter(config, outline(NEMOTRON | changes, "/m/config.json"))


def test_files_without_a_tensor_of_the_module_say_so(tmp_path: Path) -> None:
    folder = str(save_folder(tmp_path, CONFIGS["llama"]))
    config = SpeculativeConfig.parse({"method": "mtp", "num_speculative_tokens": 1})
    with pytest.raises(ValueError, match="no tensor begins with 'mtp.': the checkpoint has no multi-token-prediction"):
        registry.make_drafter(config, replace(outline(CONFIGS["llama"]), target_source=folder))


def test_a_drafter_that_does_not_fit_is_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, drafter = save_folder(tmp_path / "m", CONFIGS["llama"]), make_drafter("eagle3", "llama", tmp_path / "d")
    (drafter.folder / "config.json").write_text(json.dumps(drafter.config | {"surprise": 1}))

    def read(self: ModelSource, **options: Any) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(FolderSource, "read", read)
    with pytest.raises(ValueError, match=f"{drafter.folder}/config.json: surprise=1: Outrider does not read this"):
        LLM(str(folder), speculative_config={"model": str(drafter.folder), "num_speculative_tokens": 2})
