"""Configs that leave a key out: the default is the one of transformers' config class, or the key is asked for. And
configs with keys of parts that the model does not have.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.layers import Module, Router
from outrider.models.base import Model
from outrider.models.config import ConfigError
from outrider.models.registry import build_model
from tests.models.oracle import (
    ALL,
    CONDITIONAL,
    KDA_FAMILIES,
    KDA_SINCE,
    POOLED_FAMILIES,
    STREAM_FAMILIES,
    all_logits,
    hf_config,
    hf_logits,
    load,
    make_folder,
    tokens_of,
)

INSTALLED, NEWER = ([int(part) for part in text.split(".")[:2]] for text in (version("transformers"), KDA_SINCE))
NEW = {*KDA_FAMILIES, *STREAM_FAMILIES, *POOLED_FAMILIES, "hy_v4", "hy_v4_yarn"}
# One config of each architecture that has the key.
FIRST = {name: family for family, (name, _) in reversed(ALL.items()) if INSTALLED >= NEWER or family not in NEW}
EPS, SCALE = "rms_norm_eps", "routed_scaling_factor"
# Keys that must be there: indexers have queries of that rank, and DeepSeek-V2's method names groups.
ASKED = {"DeepseekV2": ("n_group", "topk_group"), "DeepseekV32": ("q_lora_rank",), "GlmMoeDsa": ("q_lora_rank",),
         "HYV4": ("q_lora_rank",)}


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    kind = "ForConditionalGeneration" if family in CONDITIONAL else "ForCausalLM"
    values = hf_config(family, **changes).to_dict() | {"architectures": [ALL[family][0] + kind]}
    made: dict[str, Any] = json.loads(json.dumps(values))
    return made


def text_of(config: dict[str, Any]) -> dict[str, Any]:
    text: dict[str, Any] = config.get("text_config", config)
    return text


def routers_of(module: Module) -> Iterator[Router]:
    if isinstance(module, Router):
        yield module
    for _, part in module.parts():
        yield from routers_of(part)


def build(config: dict[str, Any]) -> Model:
    return build_model(config, dtype=torch.float32, device="meta")


@pytest.mark.parametrize("name", FIRST)
def test_a_key_that_is_left_out_has_transformers_default(name: str) -> None:
    family = FIRST[name]
    config = config_of(family)
    for key in (EPS, SCALE):
        if key not in text_of(config):
            continue
        without = json.loads(json.dumps(config))
        del text_of(without)[key]
        default = text_of(type(hf_config(family)).from_dict(without).to_dict())[key]
        model: Any = build(without)
        if key == EPS:
            assert model.sizes.eps == default
        else:
            assert {router.rule.scale for router in routers_of(model)} == {default}


@pytest.mark.parametrize(("family", "changes"), [
    ("llama4", {"moe_layers": []}),
    ("llama4", {"no_rope_layers": [1] * 4}),
    ("granite_hybrid_dense", {"layer_types": ["attention"] * 4}),
    ("deepseek_v3", {"first_k_dense_replace": 4}),
    # transformers' cache asks for a layer that attends.
    ("nemotron_h", {"hybrid_override_pattern": "MM-M", "use_cache": False}),
    *[("kimi_linear", {"layer_types": ["linear_attention"] * 5, "use_cache": False}),
      ("bailing_hybrid", {"layer_types": ["linear_attention"] * 5, "use_cache": False}),
      ("kimi_linear", {"mlp_layer_types": ["dense"] * 5}), ("kimi_linear", {"n_shared_experts": 0}),
      ("qwen4_exp", {"layer_types": ["indexed_attention"] * 4, "ple_layer_ids": []})] * (INSTALLED >= NEWER),
])
def test_keys_of_parts_that_a_model_does_not_have(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Files keep them: small Granite 4 models are dense and attend in every layer, and name sizes of Mamba-2."""
    folder, tokens = make_folder(family, tmp_path, **changes), tokens_of(seed=1, count=40)
    with torch.no_grad():
        assert (all_logits(load(folder), tokens) - hf_logits(folder, tokens)).abs().max() < 1e-4


@pytest.mark.parametrize("family", ["ministral3", "gpt_oss"])
def test_a_rope_that_is_left_out_is_asked_for(family: str) -> None:
    """transformers' default is the yarn of one checkpoint."""
    config = config_of(family)
    del config["rope_parameters"]
    with pytest.raises(ConfigError, match="rope_parameters is missing"):
        build(config)


def test_a_theta_that_is_left_out() -> None:
    for family, theta in (("cohere", 500_000.0), ("cohere2", 10_000.0)):
        config = config_of(family)
        del config["rope_parameters"]
        model: Any = build(config)
        assert model.read_rope(model.config).theta == theta


@pytest.mark.parametrize("name", [name for name in (
    "DeepseekV2", "DeepseekV3", "DeepseekV32", "GlmMoeDsa", "Glm4Moe", "HYV4", "KimiLinear", "BailingHybrid")
    if name in FIRST])
def test_experts_and_queries_that_are_left_out_are_those_of_transformers(name: str) -> None:
    """Groups of experts, experts that every token takes, dense layers at the beginning, and the rank of the queries."""
    family = FIRST[name]
    config = config_of(family, num_experts_per_tok=8,
                       **{"n_routed_experts" if name == "DeepseekV2" else "num_local_experts": 32})
    for key in ("num_expert_group", "n_group", "topk_group", "n_shared_experts", "first_k_dense_replace",
                "mlp_layer_types", "q_lora_rank"):
        if key not in ASKED.get(name, ()):
            config.pop(key, None)
    default = type(hf_config(family)).from_dict(json.loads(json.dumps(config)))
    wanted = default.to_dict() | {"architectures": config["architectures"]}
    assert shapes_of(build(config)) == shapes_of(build(json.loads(json.dumps(wanted))))
    groups = {(router.rule.num_groups, router.rule.top_groups) for router in routers_of(build(config))}
    assert groups == {(default.n_group, default.topk_group)}


def shapes_of(model: Model) -> dict[str, tuple[int, ...]]:
    return {name: tuple(slot.shape) for name, slot in model.weights().items()}
