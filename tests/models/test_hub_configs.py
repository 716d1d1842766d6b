"""`quantization_config` sections as files on hubs have them: served in the right form, or refused by the key."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.models.sources.quantization import read_quantization

MATRIX = "model.layers.3.mlp.experts.down_proj"
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128,
        "block_structure": None, "dynamic": False, "actorder": None, "observer": "minmax"}
FP8 = INT4 | {"num_bits": 8, "type": "float", "strategy": "channel", "group_size": None}
FP4 = FP8 | {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}
TOKEN = FP8 | {"strategy": "token", "dynamic": True, "observer": None}
CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "damp_percent": 0.1, "desc_act": False, "sym": True,
        "true_sequential": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
MODELOPT = {"quant_method": "modelopt", "producer": {"name": "modelopt", "version": "0.29.0"}}


def compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
            "global_compression_ratio": None, "kv_cache_scheme": None, "ignore": ["lm_head"],
            "config_groups": {"group_0": group}, **more}


SERVED: dict[str, tuple[dict[str, Any], str, int]] = {
    "AWQ of AutoAWQ": (AWQ | {"backend": "autoawq", "do_fuse": False, "exllama_config": None, "fuse_max_seq_len": None,
                              "modules_to_fuse": None, "modules_to_not_convert": ["visual"]}, "int4", 128),
    "AWQ with old names": ({"quant_method": "awq", "w_bit": 4, "q_group_size": 128, "zero_point": True,
                            "version": "GEMM"}, "int4", 128),
    "GPTQ of AutoGPTQ": (GPTQ | {"model_name_or_path": None, "model_file_base_name": "model", "static_groups": False},
                         "int4", 128),
    "GPTQ of optimum": (GPTQ | {"batch_size": 1, "block_name_to_quantize": None, "cache_block_outputs": True,
                                "dataset": "c4", "exllama_config": {"version": 1}, "max_input_length": None,
                                "modules_in_block_to_quantize": [["self_attn.q_proj"]], "pad_token_id": None,
                                "use_cuda_fp16": False, "use_exllama": True, "tokenizer": None}, "int4", 128),
    "GPTQ of GPTQModel": (GPTQ | {"checkpoint_format": "gptq_v2", "lm_head": False, "pack_dtype": "int32",
                                  "dynamic": None, "meta": {"quantizer": ["gptqmodel:5.0"]}, "act_group_aware": True,
                                  "pack_impl": "cpu"}, "int4", 128),
    "GPTQ in order of importance": (GPTQ | {"desc_act": True}, "gptq_ordered", 0),
    "GPTQ of 8 bits": (GPTQ | {"bits": 8, "group_size": 32}, "int8", 32),
    "GPTQ without groups": (GPTQ | {"group_size": -1}, "int4", 0),
    "W4A16": (compressed("pack-quantized", INT4), "int4", 128),
    "W4A16_ASYM": (compressed("pack-quantized", INT4 | {"symmetric": False}), "int4", 128),
    "W4A16 with weights in order": (compressed("pack-quantized", INT4 | {"actorder": "weight"}), "int4", 128),
    "W4A16 with groups in order": (compressed("pack-quantized", INT4 | {"actorder": "group"}), "gptq_ordered", 0),
    "W8A16": (compressed("pack-quantized", INT4 | {"num_bits": 8, "strategy": "channel", "group_size": None}),
              "int8", 0),
    "W8A8": (compressed("int-quantized", FP8 | {"type": "int"}, TOKEN | {"type": "int", "symmetric": False}),
             "int8", 0),
    "W4A8": (compressed("pack-quantized", INT4, TOKEN | {"type": "int"}), "int4", 128),
    "FP8": (compressed("float-quantized", FP8 | {"strategy": "tensor"}, FP8 | {"strategy": "tensor"}), "fp8", 0),
    "FP8_DYNAMIC with a cache": (compressed("float-quantized", FP8, TOKEN, kv_cache_scheme=CACHE, version="0.12.2",
                                            sparsity_config={}, transform_config={}), "fp8", 0),
    "FP8_BLOCK": (compressed("float-quantized", FP8 | {"strategy": "block", "block_structure": [128, 128]},
                             TOKEN | {"strategy": "group", "group_size": 128}), "fp8", 128),
    "NVFP4": (compressed("nvfp4-pack-quantized", FP4 | {"scale_dtype": "torch.float8_e4m3fn", "zp_dtype": None},
                         FP4 | {"dynamic": "local"}), "fp4", 16),
    "MXFP4": (compressed("mxfp4-pack-quantized", FP4 | {"strategy": "group", "group_size": 32},
                         FP4 | {"strategy": "group", "group_size": 32, "dynamic": True}), "fp4", 32),
    "MXFP8": (compressed("mxfp8-quantized", FP8 | {"strategy": "group", "group_size": 32}), "fp8", 32),
    "ModelOpt FP8": (MODELOPT | {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]},
                     "fp8", 0),
    "ModelOpt FP8 by rows": (MODELOPT | {"quantization": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}}, "fp8", 0),
    "ModelOpt NVFP4": (MODELOPT | {"quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"],
                                   "kv_cache_scheme": CACHE, "config_groups": {"group_0": {}}}, "fp4", 16),
    "DeepSeek": (BLOCKS, "fp8", 128),
    "DeepSeek with powers of two": (BLOCKS | {"scale_fmt": "ue8m0"}, "fp8", 128),
    "Qwen": (BLOCKS | {"modules_to_not_convert": ["lm_head", "model.layers.3.input_layernorm"]}, "fp8", 128),
    "AutoFP8": ({"quant_method": "fp8", "activation_scheme": "static", "kv_cache_scheme": "static",
                 "ignored_layers": ["re:.*lm_head"]}, "fp8", 0),
    "FBGEMM": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0,
                "modules_to_not_convert": ["model.layers.0"]}, "fp8", 0),
    "gpt-oss": ({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
                "fp4", 32),
}

MIXED = {"group_0": {"format": "pack-quantized", "targets": ["re:.*mlp.*"], "weights": INT4},
         "group_1": {"format": "float-quantized", "targets": ["re:.*attn.*"], "weights": FP8}}
METHOD = "quant_method={!r} is not one of .* use files in one of these forms, a GGUF file, or the unquantised model"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "AWQ gemv": (AWQ | {"version": "gemv"}, "version='gemv' .*supported: 'gemm'"),
    "AWQ gemv_fast": (AWQ | {"version": "gemv_fast"}, "version='gemv_fast'"),
    "AWQ marlin": (AWQ | {"version": "marlin"}, "version='marlin'"),
    "GPTQ marlin": (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format='marlin' .*supported: 'gptq'"),
    "GPTQ for marlin": (GPTQ | {"is_marlin_format": True}, "is_marlin_format=True"),
    "GPTQ of 3 bits": (GPTQ | {"bits": 3}, "bits=3 .*supported: 4, 8"),
    "GPTQ by module": (GPTQ | {"dynamic": {r"+:.*\.mlp\..*": {"bits": 8}}}, "dynamic=.*one setting for all modules"),
    "W3A16": (compressed("pack-quantized", INT4 | {"num_bits": 3}), "weights: num_bits=3"),
    "MXFP6": (compressed("mxfp6-pack-quantized", FP8 | {"num_bits": 6}), "format='mxfp6-pack-quantized'"),
    "Marlin 2:4": (compressed("marlin-24", INT4), "format='marlin-24' .*supported: float-quant"),
    "2:4": (compressed("float-quantized", FP8, sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config="),
    "rotated": (compressed("pack-quantized", INT4, transform_config={"config_groups": {"R1": {}}}), "transform"),
    "mixed names": (compressed("mixed-precision", INT4, config_groups=MIXED), "config_groups=.*must be in one"),
    "not compressed": (compressed("dense", FP8, quantization_status="frozen"), "quantization_status='frozen'"),
    "ModelOpt mixed": (MODELOPT | {"quant_algo": "MIXED_PRECISION", "quantized_layers": {}}, "quant_algo='MIXED_PREC"),
    "ModelOpt W4A16": (MODELOPT | {"quant_algo": "W4A16_AWQ", "group_size": 128}, "quant_algo='W4A16_AWQ'"),
    "ModelOpt nested": (MODELOPT | {"quantization": {"quant_algo": "FP8", "surprise": 1}}, "quantization: surprise=1"),
    "blocks of one row": (BLOCKS | {"weight_block_size": [1, 128]}, r"weight_block_size=\[1, 128\]"),
    "static blocks": (BLOCKS | {"activation_scheme": "static"}, "activation_scheme='static'"),
    "experts in fp4": (BLOCKS | {"expert_dtype": "fp4"}, "expert_dtype='fp4': Outrider does not read this"),
    "no method": ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, METHOD.format(None)),
    "a list of methods": ({"quant_method": ["fp8"]}, "quant_method=.* is not one of"),
} | {method: ({"quant_method": method, "bits": 4}, METHOD.format(method)) for method in (
    "bitsandbytes", "quark", "torchao", "hqq", "aqlm", "auto-round", "awq_marlin", "quanto", "eetq")}


@pytest.mark.parametrize("name", SERVED)
def test_sections_of_hubs_are_served(name: str) -> None:
    settings, kind, group = SERVED[name]
    stored = read_quantization(settings).stored_format(MATRIX)
    assert stored is not None and (stored.kind, getattr(stored, "group", 0)) == (kind, group)


@pytest.mark.parametrize("name", REFUSED)
def test_sections_that_are_not_read_are_refused_by_their_key(name: str) -> None:
    settings, words = REFUSED[name]
    with pytest.raises(ValueError, match=f"^quantization_config: .*{words}"):
        read_quantization(settings)
