"""Writers of tiny quantised checkpoints: each turns the matrices of a model into the tensors of one form of files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from outrider.models.registry import build_model

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 96, "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128, "tie_word_embeddings": False,
}
MOE = CONFIG | {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2,
                "moe_intermediate_size": 128, "norm_topk_prob": True}
Tensors = dict[str, torch.Tensor]
Write = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]  # a matrix -> tensors by suffix, the numbers they mean
GROUP = 32


def fp8(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (weight / scales).clamp(-448, 448).to(torch.float8_e4m3fn)


def fp8_tensor(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = weight.abs().max() / 448
    codes = fp8(weight, scale)
    return {".weight": codes, ".weight_scale": scale, ".input_scale": torch.tensor(0.1)}, codes.float() * scale


def fp8_rows(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scales = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    codes = fp8(weight, scales.float())
    return {".weight": codes, ".weight_scale": scales}, codes.float() * scales.float()


def fp8_blocks(name: str, power: bool = False) -> Write:
    def write(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        sizes = [-(-size // 128) for size in weight.shape]
        scales = 0.001 + torch.rand(sizes, generator=torch.Generator().manual_seed(1)) / 500
        scales = 2.0 ** scales.log2().ceil() if power else scales
        wide = scales.repeat_interleave(128, 0)[: weight.shape[0]].repeat_interleave(128, 1)[:, : weight.shape[1]]
        codes = fp8(weight, wide)
        stored = scales.to(torch.float8_e8m0fnu) if power else scales
        return {".weight": codes, name: stored}, codes.float() * wide

    return write


def mxfp8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    groups = weight.unflatten(1, (-1, 32))
    exponents = (groups.abs().amax(-1) / 448).log2().ceil().clamp(-127, 127)
    codes = fp8(groups, 2.0 ** exponents[..., None])
    numbers = (codes.float() * 2.0 ** exponents[..., None]).flatten(1)
    return {".weight": codes.flatten(1), ".weight_scale": (exponents + 127).to(torch.uint8)}, numbers


def int8_rows(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scales = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scales).round().to(torch.int8)
    return {".weight": codes, ".weight_scale": scales}, codes.float() * scales


def grouped(weight: torch.Tensor, bits: int, is_symmetric: bool, group: int = GROUP) -> tuple[torch.Tensor, ...]:
    """(unsigned values [outputs, inputs], scales and zero points [outputs, groups], numbers)."""
    groups = weight.unflatten(1, (-1, group))
    low, high = groups.amin(-1), groups.amax(-1)
    if is_symmetric:
        high = torch.maximum(high, -low)
        low = -high
    scales = ((high - low) / ((1 << bits) - 1)).half()
    zeros = torch.full_like(low, 1 << bits - 1) if is_symmetric else (-low / scales.float()).round()
    values = (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(0, (1 << bits) - 1)
    numbers = ((values - zeros[..., None]) * scales.float()[..., None]).flatten(1)
    return values.flatten(1).long(), scales, zeros.long(), numbers


def pack(values: torch.Tensor, bits: int, axis: int) -> torch.Tensor:
    """Unsigned values in int32 words along an axis, the first in the lowest bits."""
    values = values.movedim(axis, -1)
    values = torch.nn.functional.pad(values, (0, -values.shape[-1] % (32 // bits))).unflatten(-1, (-1, 32 // bits))
    words = sum(values[..., at] << at * bits for at in range(32 // bits))
    assert isinstance(words, torch.Tensor)
    return words.to(torch.int32).movedim(-1, axis).contiguous()


def packed(bits: int, is_symmetric: bool = True) -> Write:
    def write(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        values, scales, zeros, numbers = grouped(weight, bits, is_symmetric)
        tensors = {".weight_packed": pack(values, bits, 1), ".weight_scale": scales,
                   ".weight_shape": torch.tensor(weight.shape)}
        return tensors | ({} if is_symmetric else {".weight_zero_point": pack(zeros, bits, 0)}), numbers

    return write


def gptq(bits: int, is_symmetric: bool, zero_offset: int = 1, is_ordered: bool = False) -> Write:
    def write(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        inputs = weight.shape[1]
        shuffled = torch.randperm(inputs, generator=torch.Generator().manual_seed(2))
        order = shuffled if is_ordered else torch.arange(inputs)
        values, scales, zeros, numbers = grouped(weight[:, order], bits, is_symmetric)
        back = order.argsort()
        tensors = {".qweight": pack(values[:, back].T, bits, 0), ".scales": scales.T.contiguous(),
                   ".qzeros": pack((zeros - zero_offset).T, bits, 1),
                   ".g_idx": (back // GROUP).to(torch.int32)}
        return tensors, numbers[:, back]

    return write


def awq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    values, scales, zeros, numbers = grouped(weight, 4, False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i holds column order[i]
    shuffled = [each.T.unflatten(1, (-1, 8))[..., order].flatten(1) for each in (values, zeros)]
    words = [pack(each, 4, 1) for each in shuffled]
    return {".qweight": words[0], ".qzeros": words[1], ".scales": scales.T.contiguous()}, numbers


VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def fp4(groups: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(bytes [.., width / 2] with the even column low, numbers) of groups [.., width] with scales [.., 1]."""
    nearest = ((groups / scales).abs()[..., None] - VALUES).abs().argmin(-1)
    numbers = VALUES[nearest] * groups.sign() * scales
    nibbles = (nearest | (groups < 0).long() << 3).flatten(-2)
    return (nibbles[..., ::2] | nibbles[..., 1::2] << 4).to(torch.uint8), numbers.flatten(-2)


def nvfp4(is_compressed: bool) -> Write:
    def write(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        groups = weight.unflatten(1, (-1, 16))
        total = 448 * 6 / weight.abs().max()
        scales = (groups.abs().amax(-1, keepdim=True) / 6 * total).to(torch.float8_e4m3fn)
        codes, numbers = fp4(groups, scales.float().clamp_min(2**-9) / total)
        if is_compressed:
            names = {".weight_packed": codes, ".weight_global_scale": total.view(1)}
        else:
            names = {".weight": codes, ".weight_scale_2": 1 / total, ".input_scale": torch.tensor(1.0)}
        return names | {".weight_scale": scales.squeeze(-1)}, numbers

    return write


def mxfp4(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    groups = weight.unflatten(-1, (-1, 32))
    exponents = (groups.abs().amax(-1, keepdim=True) / 6).log2().ceil().clamp(-127, 127)
    codes, numbers = fp4(groups, 2.0**exponents)
    return {".weight_packed": codes, ".weight_scale": (exponents + 127).to(torch.uint8).squeeze(-1)}, numbers


def compressed(form: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    arguments = {"symmetric": True, "dynamic": False, "observer": "minmax", "group_size": None} | dict(weights)
    group = {"targets": ["Linear"], "weights": arguments, "input_activations": inputs, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
            "config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None}


FLOAT8: dict[str, Any] = {"num_bits": 8, "type": "float"}
TOKENS = FLOAT8 | {"strategy": "token", "dynamic": True, "symmetric": True}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True,
                        "damp_percent": 0.01}


@dataclass(frozen=True)
class Form:
    settings: dict[str, Any]
    write: Write
    bits: float  # of a number, with its scales, in the kept form
    is_kept: bool = True


FORMS = {
    "fp8 static": Form({"quant_method": "fp8", "activation_scheme": "static"}, fp8_tensor, 8.4),
    "fp8 blocks": Form({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic",
                        "modules_to_not_convert": ["lm_head"]}, fp8_blocks(".weight_scale_inv"), 8.4),
    "fp8 blocks ue8m0": Form({"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
                             fp8_blocks(".weight_scale_inv", power=True), 8.4),
    "FP8": Form(compressed("float-quantized", FLOAT8 | {"strategy": "tensor"},
                           FLOAT8 | {"strategy": "tensor", "dynamic": False}), fp8_tensor, 8.4),
    "FP8_DYNAMIC": Form(compressed("float-quantized", FLOAT8 | {"strategy": "channel"}, TOKENS), fp8_rows, 8.4),
    "FP8_BLOCK": Form(compressed("float-quantized", FLOAT8 | {"strategy": "block", "block_structure": [128, 128]},
                                 FLOAT8 | {"strategy": "group", "group_size": 128, "dynamic": True}),
                      fp8_blocks(".weight_scale"), 8.4),
    "MXFP8": Form(compressed("mxfp8-quantized", FLOAT8 | {"strategy": "group", "group_size": 32}), mxfp8, 8.6),
    "W8A8": Form(compressed("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"},
                            {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}), int8_rows, 8.4),
    "W8A16": Form(compressed("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "group",
                                                "group_size": GROUP}), packed(8), 9.1),
    "W4A16": Form(compressed("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group",
                                                "group_size": GROUP}), packed(4), 5.1),
    "W4A16_ASYM": Form(compressed("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group",
                                                     "group_size": GROUP, "symmetric": False}), packed(4, False), 5.6),
    "NVFP4": Form(compressed("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group",
                                                      "group_size": 16}), nvfp4(True), 4.9),
    "MXFP4": Form(compressed("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group",
                                                      "group_size": 32}), mxfp4, 4.6),
    "GPTQ": Form(GPTQ, gptq(4, True), 5.1),
    "GPTQ 8 bits": Form(GPTQ | {"bits": 8}, gptq(8, True), 9.1),
    "GPTQ v1": Form(GPTQ | {"sym": False, "checkpoint_format": "gptq"}, gptq(4, False), 5.6),
    "GPTQ v2": Form(GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"}, gptq(4, False, 0), 5.6),
    "GPTQ desc_act": Form(GPTQ | {"desc_act": True}, gptq(4, True, is_ordered=True), 64, is_kept=False),
    "AWQ": Form({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm",
                 "modules_to_not_convert": None}, awq, 5.6),
    "ModelOpt FP8": Form({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head*"]}, fp8_tensor, 8.4),
    "FBGEMM": Form({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
                   fp8_rows, 8.4),
    "ModelOpt NVFP4": Form({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16,
                            "exclude_modules": ["lm_head"], "kv_cache_quant_algo": "FP8"}, nvfp4(False), 4.9),
}


def plain_weights(config: Mapping[str, Any]) -> Tensors:
    generator = torch.Generator().manual_seed(3)
    outline = build_model(dict(config), dtype=torch.float32, device="meta").weights()
    return {name: torch.randn(slot.shape, generator=generator) * (0.2 if len(slot.shape) == 1 else 0.05)
            + (len(slot.shape) == 1) for name, slot in outline.items()}


def is_stored(name: str) -> bool:
    return "_proj." in name


def save_form(folder: Path, form: Form, config: Mapping[str, Any] = CONFIG) -> Tensors:
    """Writes the quantised model. Returns the numbers that its tensors stand for."""
    tensors: Tensors = {}
    numbers: Tensors = {}
    for name, weight in plain_weights(config).items():
        if is_stored(name):
            parts, numbers[name] = form.write(weight)
            tensors |= {name.removesuffix(".weight") + suffix: part.clone() for suffix, part in parts.items()}
        else:
            tensors[name] = numbers[name] = weight
    save_folder(folder, tensors, dict(config) | {"quantization_config": form.settings})
    return numbers


def save_folder(folder: Path, tensors: Tensors, config: Mapping[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder
