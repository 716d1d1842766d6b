"""Every key of a config is read, known to be harmless, or refused by name. Sizes that no model has are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.models.config import ConfigError, ConfigReader
from outrider.models.config_reader import without_keys
from outrider.models.eagle import build_eagle
from outrider.models.gemma4_assistant import build_assistant
from outrider.models.harmless_keys import HARMLESS, NOT_SERVED
from outrider.models.registry import _ARCHITECTURES, build_model
from outrider.models.sources.folder import read_config
from tests.engine.harness import CONFIGS

BENCH = Path(__file__).parents[2] / "bench/configs"
HEADS = {"gemma4-4b-assistant": "gemma4-4b", "llama8b-eagle3": "llama8b"}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16", "transformers_version": "4.46.0",
          "use_cache": True, "initializer_range": 0.02}
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
         "hidden_act": "silu", "tie_word_embeddings": False}
NEMOTRON = {"hybrid_override_pattern": "M-*-", "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 8,
            "n_groups": 2, "conv_kernel": 4, "mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "hidden_act": None}
# The keys of published files of each family, with small sizes.
PUBLISHED: dict[str, dict[str, Any]] = {
    "smollm2": {"architectures": ["LlamaForCausalLM"], "is_llama_config": True, "rope_interleaved": False,
                "rope_theta": 1e5, "rope_scaling": None, "pretraining_tp": 1, "attention_dropout": 0.0,
                "mlp_bias": False, "attention_bias": False, "transformers.js_config": {"dtype": "q4"}},
    "llama 3.1": {"architectures": ["LlamaForCausalLM"], "rope_theta": 5e5, "head_dim": 16, "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        "rope_type": "llama3"}},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 4096, "rope_theta": 1e4},
    "qwen 2.5": {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False, "sliding_window": 131072,
                 "max_window_layers": 28, "use_mrope": False, "rope_theta": 1e6, "attention_dropout": 0.0},
    "qwen 2.5, longer": {"architectures": ["Qwen2ForCausalLM"], "rope_scaling": {
        "type": "yarn", "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
    "qwen 3 moe": {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16,
                   "moe_intermediate_size": 8, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
                   "output_router_logits": False, "router_aux_loss_coef": 0.001, "max_window_layers": 48,
                   "sliding_window": None, "use_sliding_window": False, "rope_scaling": None, "rope_theta": 1e6},
    "nemotron-h": NEMOTRON | {
        "architectures": ["NemotronHForCausalLM"], "attention_head_dim": 16, "auto_map": {"AutoConfig": "x.Y"},
        "chunk_size": 128, "expand": 2, "hidden_dropout": 0.0, "layer_norm_epsilon": 1e-5, "mamba_proj_bias": False,
        "mlp_bias": False, "num_logits_to_keep": 1, "rescale_prenorm_residual": True, "residual_in_fp32": False,
        "sliding_window": None, "time_step_floor": 1e-4, "time_step_limit": [0.0, "inf"], "time_step_max": 0.1,
        "time_step_min": 0.001, "time_step_rank": 256, "use_bias": False, "use_conv_bias": True,
        "use_mamba_kernels": True, "rope_theta": 10000, "partial_rotary_factor": 1.0, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 8, "moe_shared_expert_overlap": True,
        "mamba_ssm_cache_dtype": "float32", "norm_eps": 1e-5},
    "gemma 3": {"architectures": ["Gemma3ForCausalLM"], "hidden_act": None, "hidden_activation": "gelu_pytorch_tanh",
                "cache_implementation": "hybrid", "attn_logit_softcapping": None, "final_logit_softcapping": None,
                "query_pre_attn_scalar": 256, "rope_local_base_freq": 10000, "rope_theta": 1000000, "head_dim": 16,
                "rope_scaling": None, "sliding_window": 64, "sliding_window_pattern": 6},
}


# Values that models of a family have, where transformers' defaults describe none that can run.
_INDEX = {"indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 2048,
          "indexer_compress_ratio": 4}
NEEDED = {"Glm4MoeForCausalLM": {"head_dim": 128}, "DeepseekV2ForCausalLM": {"num_experts_per_tok": 6},
          "Qwen4ExpForCausalLM": _INDEX, "Qwen4ExpForConditionalGeneration": {"text_config": _INDEX}}


def build(config: dict[str, Any]) -> Any:
    return build_model(config, dtype=torch.bfloat16, device="meta")


def config_class(architecture: str) -> Any:
    import transformers

    name = architecture.replace("ForConditionalGeneration", "Config").replace("ForSequenceClassification", "Config")
    if name == architecture:
        name = architecture.replace("ForCausalLM", "TextConfig")
        if not hasattr(transformers, name):
            name = architecture.replace("ForCausalLM", "Config")
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}; later versions do")
    return getattr(transformers, name)


@pytest.mark.parametrize("architecture", _ARCHITECTURES)
def test_all_keys_of_a_family_in_transformers_are_known(architecture: str) -> None:
    config = json.loads(json.dumps(config_class(architecture)().to_dict(), default=str))
    for key, value in NEEDED.get(architecture, {}).items():
        config[key] = config[key] | value if isinstance(value, dict) else value
    build(config | {"architectures": [architecture]})


@pytest.mark.parametrize("name", PUBLISHED)
def test_all_keys_of_published_files_are_known(name: str) -> None:
    build(SIZES | TOKENS | PUBLISHED[name])


@pytest.mark.parametrize("folder", sorted(path.name for path in BENCH.iterdir()))
def test_all_keys_of_the_configs_that_are_measured_are_known(folder: str) -> None:
    config = read_config(BENCH / folder)
    if folder not in HEADS:
        build(config)
        return
    options: dict[str, Any] = {"first_layer": 99, "max_len": 1, "dtype": torch.bfloat16, "device": torch.device("meta")}
    reader, target = ConfigReader(config), build(read_config(BENCH / HEADS[folder]))
    made = (build_assistant(reader, target, **options) if "assistant" in folder
            else build_eagle(reader, "eagle3", target, **options))
    assert made.attention_layers


@pytest.mark.parametrize("change", [{"attention_sink_size": 4}, {"rope_parameters": {"wavelet": "haar"}},
                                    {"is_encoder_decoder": True}, {"quantization": {"bits": 4}}])
def test_a_key_that_nothing_reads_is_refused_by_name(change: dict[str, Any]) -> None:
    key, value = next(iter(change.items()))
    named = f"config.json: {key}: {next(iter(value))}" if key == "rope_parameters" else f"config.json: {key}="
    with pytest.raises(ConfigError, match=named):
        build(CONFIGS["llama"] | change)
    build(without_keys(CONFIGS["llama"] | change, [key, *(value if isinstance(value, dict) else ())]))


def test_a_key_in_the_language_model_of_a_larger_config_is_refused_with_its_path() -> None:
    config = config_class("Qwen3_5ForConditionalGeneration")().to_dict()
    config |= {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": config["text_config"] | {"new": 1}}
    with pytest.raises(ConfigError, match="config.json: text_config: new=1"):
        build(config)


@pytest.mark.parametrize("value", [None, False, "", [], {}])
def test_a_key_that_says_nothing_is_let_through(value: Any) -> None:
    build(CONFIGS["llama"] | {"attention_sink_size": value})


def test_attention_over_chunks_is_refused_with_what_to_do() -> None:
    chunks = {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144}
    says = "dual_chunk_attention_config=.* not supported: .*set max_model_len.*ignore_config_keys"
    with pytest.raises(ConfigError, match=says):
        build(SIZES | {"architectures": ["Qwen2ForCausalLM"], "dual_chunk_attention_config": chunks})


def test_no_key_is_both_harmless_and_refused() -> None:
    assert not HARMLESS.keys() & NOT_SERVED.keys()


@pytest.mark.parametrize(("key", "value", "says"), [
    ("num_hidden_layers", 1_000_000, "num_hidden_layers must be an integer from 1 to 1024, got 1000000"),
    ("rms_norm_eps", -1e-5, "rms_norm_eps must be a number from 0 to 1, got -1e-05"),
    ("vocab_size", 2**31 - 1, ""),
])
def test_sizes_that_no_model_has_are_refused_before_modules_are_made(key: str, value: Any, says: str) -> None:
    config = CONFIGS["llama"] | {key: value}
    if says:
        with pytest.raises(ConfigError, match=f"config.json: {says}"):
            build(config)
    else:  # only shapes are made
        assert build(config).vocab_size == value


def test_sizes_beyond_all_numbers_are_no_raw_error() -> None:
    with pytest.raises(ConfigError, match="config.json: its sizes are too large to build a model"):
        build(CONFIGS["llama"] | {"vocab_size": 2**31 - 1, "hidden_size": 2**31 - 4, "intermediate_size": 2**31 - 1})


def test_caps_of_zero_are_refused() -> None:
    for key in ("final_logit_softcapping", "attn_logit_softcapping"):
        with pytest.raises(ConfigError, match=f"{key} must be a number from 0.001"):
            build(SIZES | PUBLISHED["gemma 3"] | {key: 0.0})
