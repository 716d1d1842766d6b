"""Language models inside checkpoints that also see images, against transformers' whole models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.models.config import ConfigError
from outrider.models.registry import build_model
from outrider.models.sources.folder import read_config
from tests.models.oracle import BASE, LATENT_FAMILIES, load, mean_of, tokens_of
from tests.models.test_gguf_families import logits_of

VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
          "image_size": 32, "patch_size": 16, "head_dim": 16}
TEXT = BASE | {"head_dim": 16, "sliding_window": 16}
CASES: dict[str, dict[str, Any]] = {
    "Gemma3": {"text_config": TEXT | {"query_pre_attn_scalar": 24, "sliding_window_pattern": 2},
               "vision_config": VISION | {"vision_use_head": False}, "mm_tokens_per_image": 4},
    "Llama4": {"text_config": TEXT | {"sliding_window": None, "intermediate_size_mlp": 96, "num_local_experts": 4,
                                      "attention_chunk_size": 16, "floor_scale": 10},
               "vision_config": VISION | {"vision_output_dim": 32, "projector_input_dim": 32,
                                          "projector_output_dim": 32}},
    "Mistral3": {"text_config": TEXT | {"model_type": "mistral", "sliding_window": None},
                 "vision_config": VISION | {"model_type": "pixtral"}, "tie_word_embeddings": False},
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
    return model.eval()


@pytest.mark.parametrize("name", CASES)
def test_logits_of_a_text_equal_transformers(tmp_path: Path, name: str) -> None:
    model, tokens = make_checkpoint(name, tmp_path), tokens_of(seed=1, count=40)
    with torch.no_grad():
        expected = model(input_ids=tokens[None]).logits[0]
    assert (logits_of(load(tmp_path), tokens) - expected).abs().max() < 1e-4
    assert expected.argmax(-1).unique().numel() > 4


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
