"""What `outrider models` says is what the engine's own tables say, and the page in docs is what it prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from outrider import cli
from outrider.models import mtp, registry
from outrider.models.catalog import FAMILIES, served
from outrider.models.config import ConfigError
from outrider.models.llama import Llama
from outrider.models.mtp import describe_mtp
from outrider.models.registry import build_model, register
from outrider.models.sources.gguf_families import FAMILIES as GGUF_FAMILIES
from tests.engine.harness import CONFIGS

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(autouse=True)
def no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without architectures and prediction modules that other tests of this process have registered."""
    package = {name: model for name, model in registry._ARCHITECTURES.items() if isinstance(model, str)}
    monkeypatch.setattr(registry, "_ARCHITECTURES", package)
    modules = {model: describe for model, describe in mtp._FAMILIES.items() if describe.__module__ == mtp.__name__}
    monkeypatch.setattr(mtp, "_FAMILIES", modules)


def test_every_architecture_is_of_one_family() -> None:
    listed = [name for family in FAMILIES for name in family.architectures]
    assert sorted(listed) == sorted(registry.architectures())


def test_ids_of_the_hub_are_named_once_and_whole() -> None:
    ids = [hub_id for family in FAMILIES for hub_id in family.hub_ids]
    assert len(set(ids)) == len(ids) and all(hub_id.count("/") == 1 for hub_id in ids)
    assert all(family.hub_ids for family in FAMILIES)


def test_every_kind_of_gguf_file_is_listed_once_with_its_models() -> None:
    names = {family.name: family.gguf_names for family in FAMILIES}
    assert sorted(sum(names.values(), [])) == sorted(GGUF_FAMILIES)
    assert names["Qwen3-Next"] == ["qwen3next"], "though Qwen3.5's architecture runs them"


def test_the_page_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models", "--markdown"]) == 0
    assert (DOCS / "models.md").read_text() == capsys.readouterr().out, "outrider models --markdown > docs/models.md"


def test_the_list_names_drafters_and_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models", "--json"]) == 0
    found = {family["family"]: family for family in json.loads(capsys.readouterr().out)}
    assert found["GLM-4.5, 4.6 and 4.7"]["own_drafters"] == ["mtp"] and found["Gemma 2"]["own_drafters"] == []
    assert found["Gemma 4"]["own_drafters"] == ["gemma4 assistant"] and found["Qwen3"]["gguf"] == ["qwen3"]
    assert cli.main(["models"]) == 0
    assert "GptOssForCausalLM" in capsys.readouterr().out


def test_an_architecture_from_outside_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_ARCHITECTURES", dict(registry._ARCHITECTURES))
    register("MineForCausalLM", Llama)
    assert [*served()][-1].architectures == ("MineForCausalLM",)


def test_a_family_without_a_module_is_refused_as_the_list_says() -> None:
    """Deepseek-V2 is built like V3, which has one."""
    (family,) = (each for each in FAMILIES if each.name == "DeepSeek-V2")
    assert family.own_drafters == []
    config = CONFIGS["llama"] | {
        "architectures": ["DeepseekV2ForCausalLM"], "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
        "v_head_dim": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    with pytest.raises(ConfigError, match="no multi-token-prediction module"):
        describe_mtp(build_model(config, dtype=torch.float32, device="meta"))
