"""Folders of adapters: what is read of them, and what is refused, by its name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from outrider.features.adapters.experts_target import ExpertsTarget
from outrider.features.adapters.host_adapter import HostAdapter, read_adapter
from outrider.features.adapters.peft_folder import AdapterError, PeftFolder
from outrider.features.adapters.targets import Targets
from outrider.models.registry import build_model
from tests.engine.harness import CONFIGS, random_model
from tests.engine.recurrent_rig import HYBRIDS

MODEL = random_model(CONFIGS["llama"], torch.float64, 7)
TARGETS = Targets.from_model(MODEL)
Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"
CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


def write(path: Path, tensors: dict[str, torch.Tensor] | None = None, **config: Any) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    save_file(pair(Q_PROJ, 4) if tensors is None else tensors, path / "adapter_model.safetensors")
    return path


def pair(module: str, rank: int, inputs: int = 32, outputs: int = 32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return {f"{module}.lora_A.weight": torch.randn(rank, inputs, generator=generator),
            f"{module}.lora_B.weight": torch.randn(outputs, rank, generator=generator)}


def read(path: Path, targets: Targets = TARGETS, max_rank: int = 64, max_size: int = 1 << 24) -> HostAdapter:
    return read_adapter("own", str(path), targets, max_rank=max_rank, max_size=max_size, dtype=torch.float64)


def test_an_adapter_takes_the_room_of_its_own_rank(tmp_path: Path) -> None:
    adapter = read(write(tmp_path))
    (entry,) = adapter.entries
    assert TARGETS.all[entry.target].name == "layers.0.self_attn.q_proj"
    assert (adapter.rank, entry.scale, adapter.size) == (4, 2.0, 4 * 32 + 4 * 32)


@pytest.mark.parametrize("config, scale", [
    ({"use_rslora": True}, 4.0), ({"alpha_pattern": {"q_proj": 16}}, 4.0), ({"alpha_pattern": {"k_proj": 16}}, 2.0),
    ({"r": 2, "rank_pattern": {r"layers\.0\.self_attn\.q_proj": 4}}, 2.0), ({"lora_alpha": 4}, 1.0),
    ({"alpha_pattern": {r".*\.(?:self_attn|mlp)\.q_pro.?": 16}}, 4.0),
    ({"target_parameters": ["q_proj.weight"], "alpha_pattern": {"q_proj.weight": 16, "q_proj": 4}}, 4.0),
    ({"target_parameters": ["q_proj.weight"], "alpha_pattern": {"q_proj": 4}, "rank_pattern": {"q_proj": 2}}, 2.0),
    ({"target_parameters": ["k_proj.weight"], "alpha_pattern": {"q_proj.weight": 16}}, 2.0),
])
def test_scales_follow_ranks_and_patterns(tmp_path: Path, config: dict[str, Any], scale: float) -> None:
    (entry,) = read(write(tmp_path, **config)).entries
    assert entry.scale == scale


@pytest.mark.parametrize("config, words", [
    ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported"),
    ({"use_dora": True}, "use_dora=True is not supported: DoRA"),
    ({"alora_invocation_tokens": [5]}, r"alora_invocation_tokens=\[5\] is not supported"),
    ({"bias": "all"}, "bias='all' is not supported"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save="),
    ({"fan_in_fan_out": True}, "fan_in_fan_out=True"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4' has changed the base model"),
    ({"rotates_everything": True}, "rotates_everything=True is not supported"),
    ({"r": 0}, "r must be a positive integer, got 0"),
    ({"r": 2}, "has rank 4, and adapter_config.json says 2"),
    ({"lora_alpha": float("nan")}, "lora_alpha must be a number greater than 0"),
    ({"lora_alpha": 10**400}, "lora_alpha must be a number greater than 0"),
    ({"use_rslora": "no"}, "use_rslora must be true or false, got 'no'"),
    ({"lora_alpha": 1e308}, "self_attn.q_proj the scale 2.5e"),
    ({"target_parameters": "q_proj.weight"}, "target_parameters must be a list of names, got 'q_proj.weight'"),
    ({"rank_pattern": {"(": 2}}, "is not a valid regular expression"),
    ({"rank_pattern": {"(l*)*x": 2}}, r"'\(l\*\)\*x' repeats too much"),
    ({"alpha_pattern": {"l?" * 30 + "l" * 30: 2}}, "repeats too much"),
    ({"alpha_pattern": {str(index): 1 for index in range(5000)}}, "alpha_pattern has 5000 names, and at most 4096"),
])
def test_a_config_that_cannot_be_served_is_refused_by_its_key(tmp_path: Path, config: dict[str, Any],
                                                             words: str) -> None:
    with pytest.raises(AdapterError, match=words):
        read(write(tmp_path, **config))


NAN = {name: tensor / 0 * 0 for name, tensor in pair(Q_PROJ, 4).items()}


@pytest.mark.parametrize("tensors, words", [
    (pair(Q_PROJ, 4, inputs=48), r"q_proj.lora_A.weight \[4, 48\] .* the adapter is for another base model"),
    (pair(Q_PROJ.replace("layers.0", "layers.9"), 4), "the model has no layers.9.self_attn.q_proj"),
    (NAN, "lora_A.weight holds NaN or Inf"),
    ({name: tensor.to(torch.float8_e4m3fn) for name, tensor in pair(Q_PROJ, 4).items()}, "lora_A.weight holds torch.f"),
    ({name: tensor.to(torch.int8) for name, tensor in pair(Q_PROJ, 4).items()}, "lora_A.weight holds torch.int8"),
    ({f"{Q_PROJ}.lora_A.weight": torch.ones(4, 32)}, "q_proj.lora_A.weight has no counterpart"),
    (pair(Q_PROJ, 4) | {f"{Q_PROJ}.lora_magnitude_vector": torch.ones(32)}, "lora_magnitude_vector is no part"),
    (pair("base_model.model.model.embed_tokens", 4, 256, 32), "embed_tokens is an embedding"),
    (pair(Q_PROJ, 4) | {f"{Q_PROJ}.lora_A.default.weight": torch.ones(4, 32)}, "lora_A.weight are both for"),
    (pair(Q_PROJ, 4) | pair(Q_PROJ.removeprefix("base_model.model."), 4), "q_proj.lora_A.weight are both for"),
    (pair(Q_PROJ, 4) | {f"{Q_PROJ}.lora_embedding_A": torch.ones(4, 32)}, "are both for model.layers.0"),
    ({"other": torch.ones(1)}, "tensor other is no part of a LoRA"),
])
def test_tensors_of_another_model_are_refused_by_their_name(tmp_path: Path, tensors: dict[str, torch.Tensor],
                                                           words: str) -> None:
    with pytest.raises(AdapterError, match=words):
        read(write(tmp_path, tensors))


def test_a_rank_or_a_size_beyond_the_engines_is_refused_before_a_tensor_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, pair(Q_PROJ, 64), r=64)
    with pytest.raises(AdapterError, match="has rank 64, and max_lora_rank is 16: raise max_lora_rank"):
        read(path, max_rank=16)
    with pytest.raises(AdapterError, match="takes 32768 bytes and the engine's room for one adapter is 800: raise"):
        read(path, max_size=100)


@pytest.mark.long
@pytest.mark.skipif("OUTRIDER_TEST_ADAPTER" not in os.environ, reason="a folder with an adapter of Qwen2.5-7B")
def test_a_published_adapter_of_qwen2_5_7b_is_read() -> None:
    """Rank 16 on the seven linear layers of all 28 layers: from the wheel llm-security-reviewer 0.1.1 on PyPI, whose
    folder reviewer/adapters OUTRIDER_TEST_ADAPTER names. The model has no memory: sizes and names are read alone."""
    config = {
        "architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False,
    }
    targets = Targets.from_model(build_model(config, dtype=torch.bfloat16, device="meta"))
    folder = os.environ["OUTRIDER_TEST_ADAPTER"]
    adapter = read_adapter("own", folder, targets, max_rank=16, max_size=1 << 28, dtype=torch.bfloat16)
    assert (len(adapter.entries), adapter.rank, {entry.scale for entry in adapter.entries}) == (28 * 7, 16, {2.0})
    assert adapter.size == 40_370_176 < targets.planned_room(16)
    assert {targets.all[entry.target].name.rpartition(".")[2] for entry in adapter.entries} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path)
    header = PeftFolder.open(path)
    save_file(pair(Q_PROJ, 8), path / "adapter_model.safetensors")
    monkeypatch.setattr(PeftFolder, "open", lambda folder: header)
    with pytest.raises(AdapterError, match="was changed while it was read"):
        read(path)


def test_a_damaged_folder_is_refused_by_its_file(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="holds no adapter_config.json"):
        PeftFolder.open(tmp_path)
    path = write(tmp_path)
    (path / "adapter_model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(AdapterError, match="adapter_model.safetensors is truncated or damaged"):
        PeftFolder.open(path)
    (path / "adapter_config.json").write_text("[" * 100_000)
    with pytest.raises(AdapterError, match="adapter_config.json is damaged"):
        PeftFolder.open(path)
    (path / "adapter_config.json").write_text(" " * (2 << 20))
    with pytest.raises(AdapterError, match="has more than 1048576 bytes"):
        PeftFolder.open(path)
    (path / "adapter_model.safetensors").unlink()
    (path / "adapter_config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(AdapterError, match="holds no adapter_model.safetensors"):
        PeftFolder.open(path)


EXPERTS: dict[str, Any] = CONFIGS["llama"] | {
    "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "head_dim": 8, "norm_topk_prob": True,
}
MIXTRAL: dict[str, Any] = CONFIGS["llama"] | {
    "architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24,
}
FIXED: dict[str, Any] = {"architectures": ["GptOssForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2,
                         "head_dim": 8, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"],
                         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}


def test_experts_are_the_same_in_every_layout(tmp_path: Path) -> None:
    """The layout is read from the tensors: expert by expert, three axes, or PEFT's wrapper of a joint parameter."""
    qwen = Targets.from_model(random_model(EXPERTS, torch.float64, 7))
    name = "base_model.model.model.layers.0.mlp.experts"
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((4, 3, 32), (4, 48, 3)))
    joint = {f"{name}.gate_up_proj.lora_A.weight": a, f"{name}.gate_up_proj.lora_B.weight": b}
    wrapped = {f"{name}.base_layer.lora_A.weight": a.flatten(0, 1).clone(),
               f"{name}.base_layer.lora_B.weight": b.permute(1, 2, 0).flatten(1).clone()}
    each = {}
    for expert in range(4):
        for matrix, rows in (("gate_proj", slice(24)), ("up_proj", slice(24, 48))):
            each |= {f"{name}.{expert}.{matrix}.lora_A.weight": a[expert].clone(),
                     f"{name}.{expert}.{matrix}.lora_B.weight": b[expert, rows].clone()}
    changes = []
    short = {"gate_proj": "w1", "up_proj": "w3", "mlp": "block_sparse_moe"}
    mixtral = Targets.from_model(random_model(MIXTRAL, torch.float64, 7))
    shortened = {renamed(key, short): tensor for key, tensor in each.items()}
    cases = [*((tensors, qwen) for tensors in (joint, wrapped, each)),
             *((tensors, mixtral) for tensors in (wrapped, each, shortened))]
    for place, (tensors, targets) in enumerate(cases):
        adapter = read(write(tmp_path / str(place), tensors, r=3), targets)
        (entry,) = adapter.entries
        target = targets.all[entry.target]
        assert isinstance(target, ExpertsTarget) and not target.is_down
        first = adapter.numbers[entry.a : entry.a + 4 * entry.rank * 32].view(4, entry.rank, 32)
        second = adapter.numbers[entry.b : entry.b + 4 * 48 * entry.rank].view(4, entry.rank, 48)
        changes.append(entry.scale * second.transpose(1, 2) @ first)
    assert torch.allclose(changes[0], 8 / 3 * b @ a)
    assert all(torch.allclose(changes[0], change, rtol=1e-12) for change in changes[1:])


def renamed(name: str, names: dict[str, str]) -> str:
    return ".".join(names.get(part, part) for part in name.split("."))


SQUARE: dict[str, Any] = HYBRIDS["mamba2"] | {
    "hybrid_override_pattern": "ME", "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 16,
}


def test_experts_are_changed_once_and_by_name(tmp_path: Path) -> None:
    """An expert that is not there, a matrix that two modules change, and projections that cannot be told apart."""
    name = "base_model.model.model.layers.0.mlp.experts"
    targets = Targets.from_model(random_model(EXPERTS, torch.float64, 7))
    joint = {f"{name}.gate_up_proj.lora_A.weight": torch.ones(4, 4, 32),
             f"{name}.gate_up_proj.lora_B.weight": torch.ones(4, 48, 4)}
    for place, (tensors, words) in enumerate((
            (pair(f"{name}.4.up_proj", 4, 32, 24), r"the model has no layers.0.mlp.experts.4.up_proj"),
            (joint | pair(f"{name}.3.up_proj", 4, 32, 24), "two entries for .*layers.0.mlp.experts"))):
        with pytest.raises(AdapterError, match=words):
            read(write(tmp_path / str(place), tensors), targets)
    adapter = read(write(tmp_path / "own", pair(f"{name}.3.up_proj", 4, 32, 24) | pair(f"{name}.3.gate_proj", 4, 32, 24)
                         | pair(f"{name}.3.down_proj", 4, 24, 32)), targets)
    assert [entry.rank for entry in adapter.entries] == [4, 8]
    square = Targets.from_model(random_model(SQUARE, torch.float64, 7))
    wrapped = pair("base_model.model.backbone.layers.1.mixer.experts", 16)
    with pytest.raises(AdapterError, match=r"gate_up_proj and down_proj of the experts both have the shape \[32, 32\]"):
        read(write(tmp_path / "square", wrapped), square)


def test_experts_that_cannot_be_changed_are_named(tmp_path: Path) -> None:
    fixed = Targets.from_model(random_model(CONFIGS["llama"] | FIXED, torch.float64, 7))
    with pytest.raises(AdapterError, match="adapters cannot change this model's experts, which have biases"):
        read(write(tmp_path, pair("base_model.model.model.layers.0.mlp.experts", 16)), fixed)
