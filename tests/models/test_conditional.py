"""Language models inside checkpoints that also see images, against transformers' whole models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.layers import RopeParams, Rotary
from outrider.models.base import Decoder
from outrider.models.config import ConfigError
from outrider.models.registry import build_model
from outrider.models.sources import resolve
from outrider.models.sources.folder import read_config
from tests.models.oracle import BASE, HYBRID_FAMILIES, LATENT_FAMILIES, load, mean_of, tokens_of
from tests.models.test_classics import assert_engine_says
from tests.models.test_gguf_families import logits_of

VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
          "image_size": 32, "patch_size": 16, "head_dim": 16}
EYES = {"depth": 1, "hidden_size": 32, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64, "embed_dim": 32,
        "patch_size": 14}
SEEING = {key: value for key, value in EYES.items() if key != "embed_dim"} | {"deepstack_visual_indexes": [0]}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True}
TEXT = BASE | {"head_dim": 16, "sliding_window": 16}
ROPES = {"ministral3": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}}  # asked for
EMBEDDING = "language_model.model.embed_tokens.weight"
CASES: dict[str, dict[str, Any]] = {
    "Gemma3": {"text_config": TEXT | {"query_pre_attn_scalar": 24, "sliding_window_pattern": 2},
               "vision_config": VISION | {"vision_use_head": False}, "mm_tokens_per_image": 4},
    "Llama4": {"text_config": TEXT | {"sliding_window": None, "intermediate_size_mlp": 96, "num_local_experts": 4,
                                      "attention_chunk_size": 16, "floor_scale": 10},
               "vision_config": VISION | {"vision_output_dim": 32, "projector_input_dim": 32,
                                          "projector_output_dim": 32}},
    "Mistral3": {"text_config": TEXT | {"model_type": "mistral", "sliding_window": None},
                 "vision_config": VISION | {"model_type": "pixtral"}, "tie_word_embeddings": False},
    **{name: {"text_config": BASE | {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 2,
                                      "rope_parameters": {"rope_type": "default", "rope_theta": 500.0,
                                                          "mrope_section": [2, 3, 3]}},
              "vision_config": EYES} for name in ("Qwen2VL", "Qwen2_5_VL")},
    "Qwen3VL": {"text_config": TEXT | {"sliding_window": None, "rope_parameters": {
        "rope_type": "default", "rope_theta": 500.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}},
        "vision_config": SEEING},
    "Qwen3VLMoe": {"text_config": TEXT | EXPERTS | {"sliding_window": None},
                   "vision_config": SEEING},
    **{f"{name} around {kind}": {"text_config": BASE | {"model_type": kind}, "vision_config": VISION | {
        "model_type": "siglip_vision_model"}} for name, kind in (
            ("Llava", "llama"), ("LlavaNext", "mistral"), ("LlavaOnevision", "qwen2"))},
    **{f"InternVL around {kind}": {"text_config": BASE | {"model_type": kind}, "vision_config": VISION}
       for kind in ("llama", "qwen2", "qwen3")},
    **{name: {"text_config": BASE | {"model_type": "llama"}, "vision_config": VISION} for name in (
        "SmolVLM", "Idefics3")},
    "Lfm2Vl": {"text_config": BASE | HYBRID_FAMILIES["lfm2_bias"][1] | {"model_type": "lfm2"},
               "vision_config": VISION},
    "Mistral3 around Mistral4": {
        "text_config": BASE | LATENT_FAMILIES["mistral4"][1] | {"model_type": "mistral4"},
        "vision_config": VISION | {"model_type": "pixtral"}, "tie_word_embeddings": False},
    "Mistral3 around Ministral3": {
        "text_config": TEXT | {"model_type": "ministral3", "sliding_window": None, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.5}},
        "vision_config": VISION | {"model_type": "pixtral"}, "tie_word_embeddings": False},
}


def make_checkpoint(name: str, path: Path) -> Any:
    import transformers

    torch.manual_seed(1)
    kind = name.partition(" ")[0]
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(getattr(transformers, f"{kind}Config")(
        **CASES[name]))
    for key, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=mean_of(key, name), std=0.2)
    model.save_pretrained(path)
    if kind == "Qwen3VLMoe":
        turn_experts(path / "model.safetensors")
    return model.eval()


def turn_experts(path: Path) -> None:
    """Store experts as the makers do, inputs before outputs; transformers reads both forms."""
    turned = {name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
              for name, tensor in load_file(path).items()}
    save_file(turned, path, {"format": "pt"})


@pytest.mark.parametrize("name", CASES)
def test_logits_of_a_text_equal_transformers(tmp_path: Path, name: str) -> None:
    model, tokens = make_checkpoint(name, tmp_path), tokens_of(seed=1, count=40)
    with torch.no_grad():
        expected = model(input_ids=tokens[None]).logits[0]
    assert (logits_of(load(tmp_path), tokens) - expected).abs().max() < 1e-4
    assert expected.argmax(-1).unique().numel() > 4


@pytest.mark.parametrize("name", ["InternVL around qwen2", "Mistral3"])
def test_an_own_output_wins_over_the_whole_config_s_default(tmp_path: Path, name: str) -> None:
    """transformers saves `tie_word_embeddings: true` at the top of these, whatever the text section says."""
    import transformers

    make_checkpoint(name, tmp_path)
    path, tensors = tmp_path / "config.json", load_file(tmp_path / "model.safetensors")
    config = read_config(tmp_path)
    own = config["text_config"] | {"tie_word_embeddings": False}
    path.write_text(json.dumps(config | {"tie_word_embeddings": True, "text_config": own}))
    tensors["language_model.lm_head.weight"] = 0.2 * torch.randn(tensors[EMBEDDING].shape)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    tokens = tokens_of(seed=1, count=40)
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        expected = theirs(input_ids=tokens[None]).logits[0]
    assert (logits_of(load(tmp_path), tokens) - expected).abs().max() < 1e-4
    assert resolve(tmp_path).config["tie_word_embeddings"] is False
    (tmp_path / "model.safetensors").unlink()
    assert resolve(tmp_path).config["tie_word_embeddings"] is True


def test_experts_of_a_section_without_the_key_are_normalised(tmp_path: Path) -> None:
    """transformers' config class has no `norm_topk_prob`: its router always divides by the sum."""
    model, tokens = make_checkpoint("Qwen3VLMoe", tmp_path), tokens_of(seed=1, count=40)
    config = read_config(tmp_path)
    for change in ({"norm_topk_prob": None}, {"norm_topk_prob": True}):
        text = config["text_config"] | change
        (tmp_path / "config.json").write_text(json.dumps(config | {"text_config": text}))
        with torch.no_grad():
            expected = model(input_ids=tokens[None]).logits[0]
        assert (logits_of(load(tmp_path), tokens) - expected).abs().max() < 1e-4
    other = {"text_config": config["text_config"] | {"norm_topk_prob": False}}
    with pytest.raises(ConfigError, match="text_config: norm_topk_prob=False is not supported"):
        build_model(config | other, dtype=torch.float32, device="meta")


@pytest.mark.parametrize(("name", "config_class"), [
    ("Qwen2VL", "Qwen2VLText"), ("Qwen2_5_VL", "Qwen2_5_VLText"), ("Qwen3VL", "Qwen3VLText"),
    ("Qwen3VLMoe", "Qwen3VLMoeText"), ("Mistral3 around Ministral3", "Ministral3")])
def test_a_rope_and_eps_that_a_section_leaves_out_are_those_of_transformers(name: str, config_class: str) -> None:
    import transformers

    theirs = getattr(transformers, f"{config_class}Config")()
    text = BASE | (EXPERTS if "Moe" in name else {}) | {"model_type": theirs.model_type, "head_dim": 16}
    gone = {"rms_norm_eps", "rope_theta", "rope_parameters"}
    rope = {"rope_parameters": {"rope_type": "default"}} if "Ministral" in name else {}
    config = {"architectures": [f"{name.partition(' ')[0]}ForConditionalGeneration"],
              "text_config": {key: value for key, value in text.items() if key not in gone} | rope}
    model = build_model(config, dtype=torch.float32, device="cpu")
    assert isinstance(model, Decoder) and model.sizes.eps == theirs.rms_norm_eps
    params = RopeParams(kind="default", theta=theirs.rope_parameters["rope_theta"], rotary_dim=16, original_len=8)
    wanted = Rotary(params, max_len=8, dtype=torch.float32, device=torch.device("cpu"))
    assert torch.equal(model.rotaries[0].table[:8], wanted.table)


@pytest.mark.parametrize(("kind", "given", "window"), [
    ("mistral", {}, 4096), ("mistral", {"sliding_window": None}, None), ("mistral", {"sliding_window": 8}, 8),
    ("ministral3", {}, None)])
def test_a_window_that_a_section_leaves_out_is_that_of_transformers(kind: str, given: dict[str, Any],
                                                                    window: int | None) -> None:
    import transformers

    theirs = {"mistral": transformers.MistralConfig, "ministral3": transformers.Ministral3Config}[kind](**given)
    text = {"model_type": kind, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, **given}
    model = build_model({"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text},
                        dtype=torch.float32, device="meta")
    assert isinstance(model, Decoder)
    assert {layer.window for layer in model.attention_layers} == {window} == {theirs.sliding_window}


@pytest.mark.parametrize("name", ["Qwen3VLMoe", *(pytest.param(name, marks=pytest.mark.long) for name in (
    "Qwen2_5_VL", "Qwen3VL", "SmolVLM", "Lfm2Vl", "InternVL around qwen3", "LlavaNext around mistral"))])
@torch.inference_mode()
def test_an_engine_says_what_transformers_does(tmp_path: Path, name: str) -> None:
    assert_engine_says(tmp_path, make_checkpoint(name, tmp_path))


def test_keys_and_formats_of_both_parts_of_a_config_are_read(tmp_path: Path) -> None:
    make_checkpoint("Mistral3", tmp_path)
    config = read_config(tmp_path)
    nested = {"text_config": config["text_config"] | {"new": 1}}
    for change, says in (({"quantization_config": {"quant_method": "hqq"}}, "quantization_config"),
                         ({"new": 1}, "new=1"), (nested, "text_config: new=1")):
        with pytest.raises(ConfigError, match=says):
            build_model(config | change, dtype=torch.float32, device="meta")
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    build_model(config | {"quantization_config": fp8}, dtype=torch.float32, device="meta")


def test_configs_of_older_files_hold_the_keys_of_the_text_beside_the_others(tmp_path: Path) -> None:
    make_checkpoint("Qwen2_5_VL", tmp_path)
    config, tokens = read_config(tmp_path), tokens_of(seed=1, count=40)
    before = logits_of(load(tmp_path), tokens)
    text = config.pop("text_config") | {"rope_parameters": None, "rope_theta": 500.0, "rope_scaling": {
        "type": "mrope", "mrope_section": [2, 3, 3]}}
    (tmp_path / "config.json").write_text(json.dumps(text | config))
    assert torch.equal(logits_of(load(tmp_path), tokens), before)


def test_another_language_model_is_refused(tmp_path: Path) -> None:
    make_checkpoint("Llava around llama", tmp_path)
    config = read_config(tmp_path)
    changed = {"text_config": config["text_config"] | {"model_type": "gemma"}}
    with pytest.raises(ConfigError, match="text_config: model_type='gemma' is not supported; .* llama, mistral, qwen2"):
        build_model(config | changed, dtype=torch.float32, device="meta")


@pytest.mark.parametrize(("name", "kind", "config_class"), [
    ("Gemma3", None, "Gemma3Text"), ("Mistral3", "mistral", "Mistral"),
    ("Mistral3", "ministral3", "Ministral3"), ("LlavaNext", "mistral", "Mistral"),
    ("Llava", "llama", "Llama"), ("InternVL", "qwen2", "Qwen2"), ("InternVL", "qwen3", "Qwen3"),
    ("SmolVLM", "llama", "Llama")])
def test_sizes_that_a_section_leaves_out_are_those_of_transformers(name: str, kind: str | None,
                                                                   config_class: str) -> None:
    """Published files of these say only what differs."""
    import transformers

    config = {"architectures": [f"{name}ForConditionalGeneration"],
              "text_config": {"model_type": kind} | ROPES.get(kind or "", {})}
    model = build_model(config, dtype=torch.float32, device="meta")
    theirs = getattr(transformers, f"{config_class}Config")()
    assert isinstance(model, Decoder)
    sizes, head_dim = model.sizes, getattr(theirs, "head_dim", None)
    assert (sizes.vocab_size, sizes.hidden_size, sizes.intermediate_size, sizes.num_layers, sizes.num_heads,
            sizes.num_kv_heads, sizes.max_positions) == (
        theirs.vocab_size, theirs.hidden_size, theirs.intermediate_size, theirs.num_hidden_layers,
        theirs.num_attention_heads, theirs.num_key_value_heads, theirs.max_position_embeddings)
    assert head_dim is None or sizes.head_dim == head_dim
