"""Hybrid families against transformers: logits, greedy text, the files' forms; and against themselves in chunks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.cache.kinds import FullSpec, RecurrentSpec
from outrider.layers import StepContext, StillRotary
from outrider.models import nemotron_h
from outrider.models.config import ConfigError, ConfigReader
from outrider.models.hybrid import HybridDecoder, read_limits
from outrider.models.registry import build_model
from outrider.models.sources.folder import read_config
from tests.models.oracle import (
    HYBRID_FAMILIES,
    DenseAttend,
    all_logits,
    assert_chunked_equals_whole,
    assert_greedy_text_equals,
    assert_logits_equal,
    hf_config,
    hf_logits,
    hf_model,
    load,
    tokens_of,
)

Folders = Callable[[str], Path]


@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_logits_equal_transformers(folder_of: Folders, family: str) -> None:
    assert_logits_equal(folder_of(family), count=150)  # more than two chunks of a scan


@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_chunked_equals_whole(folder_of: Folders, family: str) -> None:
    assert_chunked_equals_whole(folder_of(family), 150, (1, 2, 15, 1, 1, 65, 3), 1e-10)


@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_greedy_text_equals_transformers(folder_of: Folders, family: str) -> None:
    assert_greedy_text_equals(folder_of(family))


@pytest.mark.parametrize("family", ["nemotron_h_latent", "qwen3_5_moe", "bamba"])
def test_bfloat16_is_near_float64(folder_of: Folders, family: str) -> None:
    """The tiny models amplify rounding, so transformers' own error is the yardstick."""
    tokens = tokens_of(seed=5, count=40)
    exact = all_logits(load(folder_of(family), torch.float64), tokens)
    logits = all_logits(load(folder_of(family), torch.bfloat16), tokens)
    theirs = hf_logits(folder_of(family), tokens, dtype=torch.bfloat16).float()
    assert (logits - exact).abs().mean() < 1.2 * (theirs - exact).abs().mean()


def test_taps_are_the_residual_stream(folder_of: Folders) -> None:
    """As transformers counts them: what goes into each layer."""
    tokens = tokens_of(seed=4, count=30)
    with torch.no_grad():
        states = hf_model(folder_of("nemotron_h")).model(tokens[None], output_hidden_states=True).hidden_states
    model = load(folder_of("nemotron_h"))
    hidden = model.forward(tokens, StepContext(DenseAttend(model), torch.arange(30)), aux_layers=(0, 1, 2, 4))
    for state, layer in zip(hidden.aux_states, (0, 1, 2, 4), strict=True):
        torch.testing.assert_close(state, states[layer][0], atol=1e-4, rtol=1e-4)


def test_cache_layers_say_what_each_layer_keeps(folder_of: Folders) -> None:
    full = FullSpec(2, 16, 2)
    mamba = RecurrentSpec(128 + 2 * 16, 4, (8, 16, 8), (8,), 128, 2)
    model = load(folder_of("nemotron_h"), torch.bfloat16)  # "M*-EME"
    assert [(c.layer, c.spec) for c in model.cache_layers()] == [(0, mamba), (1, full), (4, mamba)]
    delta = RecurrentSpec(2 * 16 + 64, 4, (4, 16, 8), (4, 4), 64, 2)
    model = load(folder_of("qwen3_5"), torch.bfloat16)
    assert [(c.layer, c.spec) for c in model.cache_layers()] == [(0, delta), (1, delta), (2, delta), (3, full)]
    assert isinstance(model, HybridDecoder)
    assert {index: mixer.spec for index, mixer in model.recurrent_layers.items()} == dict.fromkeys(range(3), delta)


# Forms of configs and checkpoints


@pytest.mark.parametrize("is_moe", [False, True])
def test_the_language_model_of_a_checkpoint_with_a_vision_tower(tmp_path: Path, is_moe: bool) -> None:
    import transformers

    name = "Qwen3_5Moe" if is_moe else "Qwen3_5"
    text = hf_config("qwen3_5_moe" if is_moe else "qwen3_5").to_dict()
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64,
              "num_position_embeddings": 16}
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision, image_token_id=250,
                                                    video_token_id=251, vision_start_token_id=252,
                                                    vision_end_token_id=253)
    torch.manual_seed(5)
    reference = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    reference.save_pretrained(tmp_path)
    if is_moe:
        fuse_experts(tmp_path / "model.safetensors")  # as published; transformers itself saves them one by one
    model, tokens = load(tmp_path), tokens_of(seed=1, count=70).clamp_max(249)
    with torch.no_grad():
        expected = reference(tokens[None]).logits[0]
    assert (all_logits(model, tokens) - expected).abs().max() < 1e-4


def fuse_experts(path: Path) -> None:
    """All experts of a layer in one tensor for each projection."""
    tensors = load_file(path)
    for prefix in sorted({name.rpartition(".0.gate_proj.")[0] for name in tensors if ".experts.0.gate_proj." in name}):
        count = sum(name.startswith(f"{prefix}.") and name.endswith("up_proj.weight") for name in tensors)
        gate, up, down = (
            torch.stack([tensors.pop(f"{prefix}.{expert}.{part}_proj.weight") for expert in range(count)])
            for part in ("gate", "up", "down")
        )
        tensors |= {f"{prefix}.gate_up_proj": torch.cat((gate, up), dim=1), f"{prefix}.down_proj": down}
    save_file(tensors, path)


def test_patterns_and_lists_name_the_same_layers() -> None:
    letters = ConfigReader({"hybrid_override_pattern": "ME-*", "num_hidden_layers": 4})
    kinds = ["linear_attention", "moe", "mlp", "full_attention"]
    assert nemotron_h.read_kinds(letters) == kinds
    assert nemotron_h.read_kinds(ConfigReader({"layers_block_type": kinds})) == kinds
    older = ["mamba", "moe", "mlp", "attention"]
    assert nemotron_h.read_kinds(ConfigReader({"layers_block_type": older})) == kinds


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "MX*"}, "hybrid_override_pattern='MX*'"),
    ("nemotron_h", {"num_hidden_layers": 7}, "num_hidden_layers=7"),
    ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act='silu'"),
    ("nemotron_h", {"residual_in_fp32": True}, "residual_in_fp32=True"),
    ("nemotron_h", {"n_groups": 3}, "n_groups=3"),
    ("nemotron_h", {"n_group": 3}, "n_group=3"),
    ("nemotron_h", {"time_step_limit": [0.0, "much"]}, "time_step_limit"),
    ("qwen3_next", {"layer_types": ["linear_attention"]}, "layer_types"),
    ("qwen3_next", {"linear_num_key_heads": 3}, "linear_num_key_heads=3"),
    ("qwen3_5", {"rope_parameters": {"partial_rotary_factor": 0.1, "rope_theta": 1e4}}, "partial_rotary_factor"),
    ("bamba", {"mamba_d_head": 8}, "mamba_d_head=8"),
    ("bamba", {"attn_layer_indices": [4]}, "attn_layer_indices"),
]


@pytest.mark.parametrize(("family", "changes", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_configs_that_cannot_be_served(folder_of: Folders, family: str, changes: dict[str, Any], message: str) -> None:
    config = read_config(folder_of(family)) | changes
    with pytest.raises(ConfigError, match=re.escape(message)):
        build_model(config, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("values", [
    {"rope_parameters": {"rope_theta": None}}, {"rope_parameters": {"rope_theta": None, "rope_type": "default"}},
    {"rope_parameters": {"rope_type": "default"}, "rope_theta": None}, {"rope_theta": None},
    {"rope_parameters": {"rope_type": "default"}}, {}])
def test_olmo_hybrid_has_a_rope_unless_its_theta_is_null(folder_of: Folders, values: dict[str, Any]) -> None:
    import transformers

    theta = transformers.OlmoHybridConfig(**values).rope_parameters["rope_theta"]
    config = {key: value for key, value in read_config(folder_of("olmo_hybrid")).items() if "rope" not in key}
    model = build_model(config | values, dtype=torch.float64, device="cpu")
    assert isinstance(model, HybridDecoder)
    assert isinstance(model.rotaries[0], StillRotary) == (theta is None)


def test_limits_in_every_way_files_write_infinity() -> None:
    for top in (float("inf"), "inf", "Infinity", {"__float__": "Infinity"}, 1e999):
        assert read_limits(ConfigReader({"time_step_limit": [0.0, top]}), "time_step_limit") == (0.0, float("inf"))
    assert read_limits(ConfigReader({}), "time_step_limit") == (0.0, float("inf"))
    assert read_limits(ConfigReader({"time_step_limit": [0, 4]}), "time_step_limit") == (0.0, 4.0)


def test_a_published_shape_has_its_published_size() -> None:
    config = read_config(Path(__file__).parents[2] / "bench/configs/nemotronh-15b-a2b")
    model = build_model(config, dtype=torch.bfloat16, device="meta", max_len=128)
    count = sum(slot.target.numel() for slot in model.weights().values())
    assert 15.4e9 < count < 15.6e9
    assert isinstance(model, HybridDecoder)
    assert len(model.recurrent_layers) == 12 and len(model.attention_layers) == 3
