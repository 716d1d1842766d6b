"""What a config may say: refusals that name key and value, the registry, and the tokens that end a text."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.layers.rotary import RopeParams, Rotary, rotate
from outrider.models.config import ConfigError, ConfigReader
from outrider.models.llama import Llama
from outrider.models.registry import _ARCHITECTURES, build_model, register
from outrider.models.sources.folder import eos_token_ids, read_config
from tests.models.oracle import hf_config


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    name = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "gemma3": "Gemma3"}[family]
    return hf_config(family).to_dict() | {"architectures": [f"{name}ForCausalLM"]} | changes


def build(config: dict[str, Any], **options: Any) -> Any:
    return build_model(config, dtype=torch.float32, device="cpu", **options)


@pytest.mark.parametrize(
    ("family", "key", "value", "says"),
    [
        ("llama", "hidden_act", "gelu", "hidden_act='gelu' is not supported; supported: 'silu'"),
        ("gemma3", "hidden_activation", "silu", "hidden_activation='silu' is not supported"),
        ("gemma3", "use_bidirectional_attention", True, "use_bidirectional_attention=True is not supported"),
        ("llama", "pretraining_tp", 2, "pretraining_tp=2 is not supported; supported: 1"),
        ("qwen3", "quantization_config", {"quant_method": "fp8"}, "quantization_config={'quant_method': 'fp8'} is not"),
        ("mistral", "mlp_bias", True, "mlp_bias=True is not supported"),
        ("llama", "num_key_value_heads", 3, "num_key_value_heads=3 is not supported; it must divide"),
        ("llama", "hidden_size", None, "hidden_size is missing"),
        ("llama", "hidden_size", "64", "hidden_size must be of type int, got '64'"),
        ("llama", "attention_bias", 1, "attention_bias must be of type bool, got 1"),
        ("llama", "rms_norm_eps", True, "rms_norm_eps must be of type float, got True"),
        ("llama", "partial_rotary_factor", 0.5, "partial_rotary_factor=0.5 is not supported"),
        ("qwen2", "layer_types", ["linear_attention"] * 4, "layer_types=.* is not supported; supported types are"),
        ("qwen2", "layer_types", ["full_attention"], "layer_types=.* must name 4 layers"),
        ("llama", "layer_types", ["sliding_attention"] * 4, "layer_types=.* sliding_attention is off"),
        ("mistral", "sliding_window", 0, "sliding_window=0 is not supported; it must be at least 1"),
        ("llama", "rope_parameters", {"rope_type": "longrope"}, "rope_parameters: rope_type='longrope' is not"),
        ("llama", "rope_scaling", {"type": "mrope"}, "rope_scaling: type='mrope' is not supported; supported: 'd"),
        ("llama", "rope_parameters", {"rope_type": "linear"}, "rope_parameters: factor is missing"),
        ("llama", "architectures", [], "architectures=.. is not supported; known are .*Gemma3ForCausalLM, .*Llama"),
        ("llama", "architectures", ["GPT2"], "architectures=.'GPT2'. is not supported; known are"),
        ("llama", "architectures", None, "architectures is missing"),
    ],
)
def test_unsupported_values_are_refused_by_key_and_value(family: str, key: str, value: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=f"config.json: {says}"):
        build(config_of(family, **{key: value}))


def test_keys_without_effect_on_inference_are_let_through() -> None:
    build(config_of("llama", attention_dropout=0.3, initializer_range=1.0, use_cache=False, torch_dtype="float16"))


def test_dynamic_rope_is_refused_beyond_its_original_length() -> None:
    config = config_of("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1000.0})
    build(config, max_len=512)
    with pytest.raises(ValueError, match="rope_type='dynamic' .*512 positions, max_len is 513.*already in the cache"):
        build(config, max_len=513)


def test_a_partial_rope_rotates_the_leading_dimensions_only() -> None:
    params = RopeParams(kind="default", theta=100.0, rotary_dim=8, original_len=32)
    rotary = Rotary(params, max_len=32, dtype=torch.float64, device=torch.device("cpu"))
    x, angles = torch.randn(5, 3, 16, dtype=torch.float64), rotary.at(torch.tensor([0, 1, 5, 5, 31]))
    rotated = rotate(x, angles)
    assert torch.equal(rotated[..., 8:], x[..., 8:]) and torch.equal(rotated[..., :8], rotate(x[..., :8], angles))
    assert torch.equal(rotated[0], x[0]) and not torch.allclose(rotated[1], x[1])
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1))


def test_an_architecture_can_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(Llama):
        pass

    monkeypatch.setitem(_ARCHITECTURES, "MineForCausalLM", Llama)
    register("MineForCausalLM", Mine)
    assert isinstance(build(config_of("llama", architectures=["MineForCausalLM"])), Mine)


def test_reader_types() -> None:
    reader = ConfigReader({"a": 1, "b": None, "c": [1]}, "here")
    assert reader.required("a", float) == 1.0 and reader.get("b", int, 7) == 7 and reader.optional("z", str) is None
    with pytest.raises(ConfigError, match="here: c must be of type dict"):
        reader.section("c")


@pytest.mark.parametrize(
    ("generation", "config", "ids"),
    [
        (None, {"eos_token_id": 2}, (2,)),
        ({"eos_token_id": [5, 6]}, {"eos_token_id": 2}, (5, 6)),
        ({}, {"eos_token_id": [2, 3]}, (2, 3)),
        ({"eos_token_id": None}, {}, ()),
    ],
)
def test_eos_token_ids(
    tmp_path: Path, generation: dict[str, Any] | None, config: dict[str, Any], ids: tuple[int, ...]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert eos_token_ids(tmp_path) == ids
    assert eos_token_ids({"eos_token_id": 4}) == (4,)


def test_a_config_that_is_not_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="config.json is not valid JSON"):
        read_config(tmp_path)


def test_models_are_imported_without_transformers() -> None:
    code = "import outrider.models.loader, sys; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
