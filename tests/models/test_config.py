"""What a config may say: refusals that name key and value, the registry, and the tokens that end a text."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.layers.rotary import FREQUENCIES, RopeParams, Rotary, rotate
from outrider.models.conditional import LlamaPart
from outrider.models.config import ConfigError, ConfigReader, rope_params
from outrider.models.gemma4 import proportional_frequencies
from outrider.models.llama import Llama
from outrider.models.registry import _ARCHITECTURES, _BY_TEXT, build_model, register
from outrider.models.sources.folder import eos_token_ids, read_config
from tests.drafters.latent_rig import FAMILIES as LATENT
from tests.engine.harness import CONFIGS
from tests.models.oracle import ALL, hf_config

BENCH = Path(__file__).parents[2] / "bench/configs"


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
        ("qwen3", "quantization_config", {"quant_method": "hqq"}, "quantization_config={'quant_method': 'hqq'} is not"),
        ("mistral", "mlp_bias", True, "mlp_bias=True is not supported"),
        ("llama", "num_key_value_heads", 3, "num_key_value_heads=3 is not supported; it must divide"),
        ("llama", "hidden_size", None, "hidden_size is missing"),
        ("llama", "hidden_size", "64", "hidden_size must be an integer from 1 to 2147483647, got '64'"),
        ("llama", "attention_bias", 1, "attention_bias must be True or False, got 1"),
        ("llama", "rms_norm_eps", True, "rms_norm_eps must be a number from 0 to 1, got True"),
        ("llama", "partial_rotary_factor", 0.5, "partial_rotary_factor=0.5 is not supported"),
        ("qwen2", "layer_types", ["linear_attention"] * 4, "layer_types=.* is not supported; supported types are"),
        ("qwen2", "layer_types", ["full_attention"], "layer_types=.* each of the 4 layers"),
        ("llama", "layer_types", ["sliding_attention"] * 4, "layer_types=.* sliding_attention are not"),
        ("mistral", "sliding_window", 0, "sliding_window must be an integer from 1 to 2147483647, got 0"),
        ("llama", "rope_parameters", {"rope_type": "longrope"}, "rope_parameters: short_factor is missing"),
        ("llama", "rope_scaling", {"type": "mrope"}, "rope_scaling: type='mrope' is not supported; supported: 'd"),
        ("llama", "rope_parameters", {"rope_type": "linear"}, "rope_parameters: factor is missing"),
        ("llama", "architectures", [], "architectures=.. is not supported; supported: .*Gemma3ForCausalLM, .*Llama"),
        ("llama", "architectures", ["GPT2"], "architectures=.'GPT2'. is not supported; neither Outrider nor"),
    ],
)
def test_unsupported_values_are_refused_by_key_and_value(family: str, key: str, value: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=f"config.json: {says}"):
        build(config_of(family, **{key: value}))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_a_config_without_architectures_is_of_the_family_that_its_type_names(family: str) -> None:
    config = config_of(family, architectures=None)
    assert type(build(config)) is type(build(config_of(family)))
    with pytest.raises(ConfigError, match="is missing, and model_type='other' names no supported family. Add"):
        build(config | {"model_type": "other"})
    with pytest.raises(ConfigError, match="architectures is missing. Add one of "):
        build(config | {"model_type": None})


def test_keys_without_effect_on_inference_are_let_through() -> None:
    build(config_of("llama", attention_dropout=0.3, initializer_range=1.0, use_cache=False, torch_dtype="float16",
                    _model_name_or_path="model.gguf"))


def test_dynamic_rope_is_refused_beyond_its_original_length() -> None:
    config = config_of("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1000.0})
    build(config, max_len=512)
    params = RopeParams(kind="dynamic", theta=1000.0, rotary_dim=8, original_len=512)
    with pytest.raises(ValueError, match="rope_type='dynamic' .*512 positions, max_len is 513.*already in the cache"):
        Rotary(params, max_len=513, dtype=torch.float64, device=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"max_model_len \(513\) exceeds the 512 positions"):
        build(config, max_len=513)


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 1e6},
    "linear": {"rope_theta": 1e6, "factor": 8.0},
    "llama3": {"rope_theta": 5e5, "factor": 8.0} | LLAMA3,
    "yarn": {"rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 4096},
    "proportional": {"rope_theta": 1e6, "partial_rotary_factor": 0.25},
}


@pytest.mark.parametrize("kind", ROPES)
def test_frequencies_in_float32_have_the_bits_of_transformers(kind: str) -> None:
    """A frequency that is rounded differently moves a token of position 1000 by 6e-5, which no other test sees."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": kind} | ROPES[kind]
    model = hf_config("llama", head_dim=128, hidden_size=256, num_attention_heads=2, rope_parameters=dict(rope),
                      max_position_embeddings=1024)
    if kind == "default":
        expected = 1.0 / 1e6 ** (torch.arange(0, 128, 2).float() / 128)
    else:
        expected, _ = ROPE_INIT_FUNCTIONS[kind](model, torch.device("cpu"))
    assert torch.equal(frequencies(ConfigReader(dict(rope)), ConfigReader(model.to_dict())), expected)


def frequencies(rope: ConfigReader, text: ConfigReader) -> torch.Tensor:
    if rope.values["rope_type"] == "proportional":
        return proportional_frequencies(rope, 128, torch.float32)
    params = rope_params(text, rope, 128, 1e4)
    return FREQUENCIES[params.kind](params, torch.float32)[0]


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


def test_a_registered_class_wins_over_those_chosen_by_the_text_section(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(LlamaPart):
        pass

    name = "InternVLForConditionalGeneration"
    monkeypatch.setitem(_ARCHITECTURES, name, _ARCHITECTURES[name])
    monkeypatch.setitem(_BY_TEXT, name, _BY_TEXT[name])
    register(name, Mine)
    for kind in ("qwen2", "one of mine"):
        text = {"model_type": kind}
        made = build_model({"architectures": [name], "text_config": text}, dtype=torch.float32, device="meta")
        assert isinstance(made, Mine)


def test_reader_types() -> None:
    reader = ConfigReader({"a": 1, "b": None, "c": [1]}, "here")
    assert reader.required("a", float) == 1.0 and reader.get("b", int, 7) == 7 and reader.optional("z", str) is None
    with pytest.raises(ConfigError, match="here: c must be a dict, got \\[1\\]"):
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


@pytest.mark.parametrize("value", [256, -1, [1, 256], "</s>", [1, "x"], True, {}, 2**70, 1.0])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_an_end_that_is_no_token_is_named_with_its_file(tmp_path: Path, file: str, value: Any) -> None:
    for name in ("config.json", "generation_config.json"):
        own = {"eos_token_id": value} if name == file else {}
        (tmp_path / name).write_text(json.dumps({"vocab_size": 256} | own))
    says = f"^{tmp_path / file}: eos_token_id must be an integer from 0 .*: the vocabulary has 256 tokens. Correct it"
    with pytest.raises(ConfigError, match=says):
        eos_token_ids(tmp_path)


@pytest.mark.parametrize("text", ["[]", "5", "null", '"x"'])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_a_config_that_is_no_object_is_named(tmp_path: Path, file: str, text: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).write_text(text)
    with pytest.raises(ConfigError, match=f"{file} must hold a JSON object"):
        read_config(tmp_path)


@pytest.mark.parametrize("max_len", [513, 100_000_000, 10**12])
def test_a_length_beyond_the_positions_is_refused_before_tables_are_made(max_len: int) -> None:
    with pytest.raises(ValueError, match=rf"max_model_len \({max_len}\) exceeds the 512 positions"):
        build(config_of("llama"), max_len=max_len)


def paths_of(config: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for key, value in config.items():
        yield (key,)
        if isinstance(value, dict):
            yield from ((key, *path) for path in paths_of(value))


def changed(config: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    return config | {path[0]: value if len(path) == 1 else changed(config[path[0]], path[1:], value)}


@pytest.mark.parametrize("family", ["llama_yarn", "llama_llama3", "qwen2_sliding", "gemma3", "gemma4", "qwen3_moe",
                                    "qwen3_next", "nemotron_h", "bamba", "deepseek_v32", "glm_moe_dsa"])
def test_no_value_of_a_config_is_a_raw_error(family: str) -> None:
    """Every key in turn with values it cannot have; what has no effect on the model may be anything."""
    if family == "gemma4":
        config = read_config(Path(__file__).parents[1] / "assets/gemma4")
    elif family in LATENT:
        config = LATENT[family] | {"mlp_layer_types": None}
    else:
        config = hf_config(family).to_dict() | {"architectures": [f"{ALL[family][0]}ForCausalLM"]}
    build(config)
    for path in paths_of(config):
        for value in ("x", -1, 0, 10**30, float("nan"), [], {}, True, [[]] * 4):
            try:
                build(changed(config, path, value))
            except ConfigError as error:
                assert "config.json: " in str(error)


def test_heads_without_room_are_refused_by_key() -> None:
    with pytest.raises(ConfigError, match="hidden_size=3 is not supported; without head_dim it must be at least 4"):
        build(CONFIGS["sliding"] | {"hidden_size": 3})


def test_a_config_that_is_not_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="config.json is not valid JSON"):
        read_config(tmp_path)


def test_models_are_imported_without_transformers_and_outlined_without_sympy() -> None:
    """Some of torch's operations on the meta device import seconds of Python code, which every start would wait for."""
    code = f"""import sys, torch
from outrider.models.loader import build_model
for config in {[read_config(BENCH / name) for name in ("nemotronh-15b-a2b", "gemma4-4b", "dsv32-8b-a2b", "qwen06b")]!r}:
    build_model(config, dtype=torch.float32, device="meta")
assert not {{"transformers", "sympy"}} & sys.modules.keys()"""
    subprocess.run([sys.executable, "-c", code], check=True)
