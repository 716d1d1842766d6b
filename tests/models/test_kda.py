"""Families with KDA layers against transformers: logits, greedy text, the files' forms; and against themselves."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.models.config import ConfigError
from outrider.models.registry import build_model
from outrider.models.sources.folder import read_config
from tests.models.oracle import (
    KDA_FAMILIES,
    KDA_SINCE,
    all_logits,
    assert_chunked_equals_whole,
    assert_greedy_text_equals,
    assert_logits_equal,
    hf_logits,
    load,
    tokens_of,
)

Folders = Callable[[str], Path]
_INSTALLED = tuple(int(part) for part in version("transformers").split(".")[:2])
pytestmark = pytest.mark.skipif(
    _INSTALLED < tuple(int(part) for part in KDA_SINCE.split(".")),
    reason=f"transformers has these families since {KDA_SINCE}")


@pytest.mark.parametrize("family", KDA_FAMILIES)
def test_logits_equal_transformers(folder_of: Folders, family: str) -> None:
    assert_logits_equal(folder_of(family), count=150)  # many chunks of a scan, more than two of theirs


@pytest.mark.parametrize("family", KDA_FAMILIES)
def test_chunked_equals_whole(folder_of: Folders, family: str) -> None:
    assert_chunked_equals_whole(folder_of(family), 150, (1, 2, 15, 1, 1, 65, 3), 1e-10)


@pytest.mark.parametrize("family", KDA_FAMILIES)
def test_greedy_text_equals_transformers(folder_of: Folders, family: str) -> None:
    assert_greedy_text_equals(folder_of(family))


def makers_config(folder: Path) -> dict[str, Any]:
    """The config of a Kimi-Linear folder in the form of the makers' own files."""
    config = read_config(folder)
    kinds, dense = config.pop("layer_types"), config.pop("mlp_layer_types").count("dense")
    numbers = {kind: [i for i, own in enumerate(kinds, 1) if own == kind] for kind in set(kinds)}
    linear = {"kda_layers": numbers["linear_attention"], "full_attn_layers": numbers["full_attention"],
              "head_dim": config.pop("linear_head_dim"), "num_heads": config.pop("linear_num_heads"),
              "short_conv_kernel_size": config.pop("linear_conv_kernel_dim")}
    return config | {"linear_attn_config": linear, "first_k_dense_replace": dense, "head_dim": 72, "moe_layer_freq": 1,
                     "mla_use_nope": True, "moe_router_activation_func": "sigmoid", "use_grouped_topk": True,
                     "rope_theta": 10000.0, "rope_scaling": None, "num_nextn_predict_layers": 0}


def test_the_makers_form_of_the_config(folder_of: Folders, tmp_path: Path) -> None:
    whole = folder_of("kimi_linear")
    tokens = tokens_of(seed=6, count=40)
    (tmp_path / "model.safetensors").symlink_to(whole / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(makers_config(whole)))
    assert (all_logits(load(tmp_path), tokens) - hf_logits(whole, tokens)).abs().max() < 1e-4


@pytest.mark.parametrize(("changes", "message"), [
    ({"mla_use_nope": False}, "mla_use_nope=False"),
    ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func='softmax'"),
    ({"linear_attn_config": {"kda_layers": [1, 2, 4], "full_attn_layers": [3, 4], "head_dim": 8, "num_heads": 4}},
     "kda_layers"),
    ({"num_experts": 9, "n_routed_experts": 8}, "num_experts=9"),
    ({"num_key_value_heads": 2}, "num_key_value_heads=2"),
])  # fmt: skip
def test_configs_that_cannot_be_served(folder_of: Folders, changes: dict[str, Any], message: str) -> None:
    config = makers_config(folder_of("kimi_linear")) | changes
    with pytest.raises(ConfigError, match=message):
        build_model(config, dtype=torch.float32, device="meta")
