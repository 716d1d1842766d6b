"""Quantised safetensors files: kept in their bits where a format is there, with the tokens of the dequantised file."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from outrider.benchmarks.roofline import Traffic
from outrider.config import EngineConfig
from outrider.formats import FormatChoice, InputShard, Ranks
from outrider.formats.scaled import ScaledExperts, ScaledFormat, ScaledLinear, choose_made
from outrider.kernels import cpu as native
from outrider.kernels import experts_on_host, moe, scaled, scaled_on_host
from outrider.kernels.scaled_on_host import host_weight, packed_rows
from outrider.layers.base import find_modules
from outrider.layers.decoder import PreNormLayer
from outrider.layers.linear import FusedLinear, Linear
from outrider.layers.moe import Experts, MoE
from outrider.layers.router import Router
from outrider.models import loader
from outrider.models.base import Model
from outrider.models.config import ConfigError
from outrider.models.sources import resolve
from outrider.models.sources.model_source import WeightError
from outrider.models.sources.quantization import read_quantization
from outrider.models.sources.scaled_weights import unpack
from outrider.runner.target import load_target
from tests.engine.harness import SETTINGS
from tests.models import oracle
from tests.models import quantized_files as files
from tests.models.oracle import LOGIT_ROWS
from tests.unit.test_extending import outcome


def load(folder: Path, **settings: Any) -> Model:
    config = EngineConfig(str(folder), **(SETTINGS | {"dtype": "float64"} | settings))
    return load_target(config, resolve(folder))


def kept_bits(model: Model) -> float:
    """Bits of a number in the layers that keep codes."""
    kept = [linear for linear in find_modules([model], Linear) if isinstance(linear.format, ScaledLinear)]
    num_bytes = sum(linear.format.weight_bytes for linear in kept)
    return 8 * num_bytes / sum(linear.in_features * linear.out_features for linear in kept)


@pytest.mark.parametrize("name", files.FORMS)
def test_a_file_is_kept_in_its_bits_with_the_tokens_of_its_numbers(name: str, tmp_path: Path) -> None:
    form = files.FORMS[name]
    numbers = files.save_form(tmp_path / "quantised", form)
    model, dense = load(tmp_path / "quantised"), load(tmp_path / "quantised", keep_quantized=False)
    kept = [isinstance(linear.format, ScaledLinear) for linear in find_modules([model], Linear)]
    assert sum(kept) == (8 if form.is_kept else 0), "all but the head"
    for slot_name, slot in dense.weights().items():
        torch.testing.assert_close(slot.target.float(), numbers[slot_name], rtol=1e-6, atol=0, msg=slot_name)
    assert outcome(model) == outcome(dense)
    assert not form.is_kept or kept_bits(model) < form.bits


@pytest.mark.parametrize("name", ["fp8 blocks", "W4A16", "NVFP4"])
def test_experts_on_the_cpu_keep_their_bits(name: str, tmp_path: Path) -> None:
    numbers = files.save_form(tmp_path / "quantised", files.FORMS[name], files.MOE)
    files.save_folder(tmp_path / "numbers", numbers, files.MOE)
    kept, dense = load(tmp_path / "quantised"), load(tmp_path / "numbers")
    mixed = find_modules([kept], Experts)[0].format
    assert isinstance(mixed, ScaledExperts)
    assert mixed.weight_bytes < find_modules([dense], Experts)[0].format.weight_bytes / 6
    assert outcome(kept) == outcome(dense)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["fp8 blocks", "FP8_DYNAMIC", "W4A16_ASYM", "NVFP4"])
def test_a_rank_keeps_its_part_of_the_inputs(name: str, ranks: int) -> None:
    """Matrices whose outputs are no whole blocks, one below the other."""
    found, sizes = read_quantization(files.FORMS[name].settings), {"a": 192, "b": 130}
    stored, numbers = {}, []
    for segment, size in sizes.items():
        tensors, made = files.FORMS[name].write(torch.randn(size, 256))
        stored[segment] = found.join(segment, tensors).parts()
        numbers.append(made)
    x, total = torch.randn(3, 256, dtype=torch.float64), torch.zeros(3, 322, dtype=torch.float64)
    for rank in range(ranks):
        layer = FusedLinear(256, sizes, bias=False, dtype=torch.float64, device=torch.device("cpu"),
                            shard=InputShard(Ranks(rank, ranks), lambda partial: partial))
        layer.declare_formats(FormatChoice(found.stored_format, x.device))
        for slot_name, slot in layer.weights("x").items():
            _, segment, part = slot_name.split(".")
            assert slot.shape == tuple(stored[segment][part].shape)
            slot.store(stored[segment][part])
        total += layer(x.chunk(ranks, dim=1)[rank], LOGIT_ROWS)
    torch.testing.assert_close(total, x @ torch.cat(numbers).double().T, rtol=1e-5, atol=1e-5)


def test_products_are_exact_in_exact_mode(tmp_path: Path) -> None:
    files.save_form(tmp_path / "quantised", files.FORMS["W4A16"])
    model = load(tmp_path / "quantised", dtype="float32")
    linear = find_modules([model], Linear)[0]
    linear.set_exact(True)
    x = torch.randn(5, linear.in_features)
    assert torch.equal(linear.format.product(x)[3:4], linear.format.product(x[3:4]))


def changed(name: str, path: str, value: Any) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads(json.dumps(files.FORMS[name].settings))
    *sections, key = path.split("/")
    inner = settings
    for section in sections:
        inner = inner[section]
    inner[key] = value
    return settings


WEIGHTS = "config_groups/group_0/weights/"


@pytest.mark.parametrize(("name", "path", "value", "words"), [
    ("fp8 blocks", "weight_block_size", [64, 64], r"weight_block_size=\[64, 64\]"),
    ("fp8 blocks", "activation_scheme", "static", "activation_scheme='static'.* it must be dynamic"),
    ("fp8 static", "fmt", "e5m2", "fmt='e5m2'"),
    ("fp8 static", "surprise", 3, "surprise=3: Outrider does not read this"),
    ("fp8 static", "ignored_layers", ["re:("], "ignored_layers=.* is neither a module's name nor a regular"),
    ("fp8 static", "quant_method", "hqq", "quant_method='hqq' is not one of fp8, compressed-tensors, gptq"),
    ("W4A16", "quantization_status", "frozen", "quantization_status='frozen'"),
    ("W4A16", "format", "marlin-24", "config: format='marlin-24'"),
    ("W4A16", WEIGHTS + "num_bits", 3, "weights: num_bits=3"),
    ("W4A16", WEIGHTS + "strategy", "channel", "group_size=32 .*must be null with the strategy channel"),
    ("W4A16", WEIGHTS + "extra", 1, "weights: extra=1"),
    ("W4A16", "config_groups/group_0/output_activations", {"num_bits": 8}, "output_activations="),
    ("W4A16", "config_groups/group_0/targets", ["re:("], "targets=.* is neither a module's name nor a regular"),
    ("W4A16", "config_groups/group_0/targets", [None], "targets=.* is neither a module's name nor a regular"),
    ("W4A16", "sparsity_config", {"format": "sparse-24-bitmask"}, "sparsity_config="),
    ("FP8_DYNAMIC", WEIGHTS + "symmetric", False, "symmetric=False"),
    ("FP8_DYNAMIC", WEIGHTS + "dynamic", True, "dynamic=True"),
    ("NVFP4", WEIGHTS + "group_size", 32, "it must be 16 in the format"),
    ("W8A8", WEIGHTS + "type", "float", "num_bits=8.*int-quantized"),
    ("GPTQ", "bits", 3, "bits=3"),
    ("GPTQ", "group_size", 0, "group_size=0"),
    ("GPTQ", "dynamic", {"-:.*": {}}, "dynamic="),
    ("GPTQ", "checkpoint_format", "marlin", "checkpoint_format='marlin'"),
    ("AWQ", "version", "gemv", "version='gemv'"),
    ("AWQ", "zero_point", False, "zero_point=False"),
    ("ModelOpt NVFP4", "group_size", 32, "group_size=32"),
    ("ModelOpt FP8", "quant_algo", "W4A8_AWQ", "quant_algo='W4A8_AWQ'"),
])
def test_a_config_that_is_contradictory_or_unknown_is_refused_by_key(name: str, path: str, value: Any,
                                                                     words: str) -> None:
    read_quantization(files.FORMS[name].settings)
    with pytest.raises(ValueError, match=words):
        read_quantization(changed(name, path, value))


def test_a_refusal_names_the_file_and_the_key(tmp_path: Path) -> None:
    form = files.Form(changed("GPTQ", "bits", 3), files.FORMS["GPTQ"].write, 5)
    files.save_form(tmp_path / "quantised", form)
    with pytest.raises(ConfigError, match=r"config.json: quantization_config=.* bits=3 is not supported"):
        load(tmp_path / "quantised")


@pytest.mark.parametrize(("ignore", "left"), [
    (["re:.*down_proj$", "lm_head"], "down_proj"),
    (["model.layers.0", "lm_head"], "model.layers.0."),
    (["self_attn", "lm_head"], "self_attn"),
])
def test_modules_to_ignore_are_plain_numbers(ignore: list[str], left: str) -> None:
    found = read_quantization(files.FORMS["W4A16"].settings | {"ignore": ignore})
    for name in files.plain_weights(files.CONFIG):
        matrix = name.removesuffix(".weight")
        assert (found.stored_format(matrix) is None) == (left in name or matrix == "lm_head"), name


def test_groups_of_modules_have_schemes_of_their_own() -> None:
    settings = changed("W4A16", "config_groups/other", {
        "targets": ["re:.*q_proj"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}})
    found = read_quantization(settings)
    kinds = {name: getattr(found.stored_format(f"model.layers.0.self_attn.{name}"), "kind", None)
             for name in ("q_proj", "k_proj")}
    assert kinds == {"q_proj": "int8", "k_proj": "int4"}


def test_damaged_tensors_are_refused_by_name(tmp_path: Path) -> None:
    for name, suffix, words in (("GPTQ", ".qzeros", "zero points other than the middle"), ("GPTQ", ".g_idx", "orders"),
                                ("FP8_BLOCK", ".weight_scale", r"shape \[3, 1\]")):
        def write(weight: torch.Tensor, name: str = name, suffix: str = suffix) -> Any:
            parts, numbers = files.FORMS[name].write(weight)
            parts[suffix] = parts[suffix].roll(1, 0) if suffix == ".g_idx" else parts[suffix] * 0
            if suffix == ".weight_scale":
                parts[suffix] = torch.ones(3, 1)
            return parts, numbers

        folder = tmp_path / suffix
        files.save_form(folder, files.Form(files.FORMS[name].settings, write, 8))
        with pytest.raises(WeightError, match=words):
            load(folder)


@pytest.mark.parametrize(("config", "kind"), [
    ({"quantization_config": None}, None), ({"quantization_config": {}}, None),
    ({"quantization_config": files.FORMS["W8A8"].settings}, "int8"),
    ({"text_config": {"quantization_config": files.FORMS["W8A8"].settings}}, "int8")])
def test_a_config_alone_says_how_weights_of_a_dummy_model_are_stored(config: dict[str, Any], kind: str | None,
                                                                     tmp_path: Path) -> None:
    """An empty section means plain numbers, and not the blocks of fp8 that files without a section may have."""
    (tmp_path / "config.json").write_text(json.dumps(files.CONFIG | config))
    assert getattr(resolve(tmp_path).stored_format("model.layers.0.mlp.up_proj"), "kind", None) == kind


def none(tensor: torch.Tensor) -> None:
    return None


def as_floats(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float()


def cut(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:-1]


@pytest.mark.parametrize(("name", "suffix", "change", "words"), [
    ("fp8 static", ".weight_scale", none, r"down_proj.weight_scale is missing, though .* hold .*down_proj.weight,"),
    ("fp8 blocks", ".weight_scale_inv", none, "down_proj.weight holds .*float8_e4m3fn.*weight_scale_inv .* missing"),
    ("FBGEMM", ".weight_scale", none, "down_proj.weight holds .*float8_e4m3fn.*weight_scale .* missing"),
    ("FP8_DYNAMIC", ".weight_scale", torch.Tensor.long, "scales of .*down_proj have dtype torch.int64"),
    ("W4A16", ".weight_scale", none, r"down_proj.weight_scale is missing"),
    ("W4A16", ".weight_shape", none, r"down_proj.weight_shape is missing"),
    ("W4A16", ".weight_shape", cut, r"down_proj.weight_shape is \[128\].* 128 x 256 codes"),
    ("W4A16", ".weight_shape", lambda tensor: tensor // 2, r"down_proj.weight_shape is \[64, 128\]"),
    ("W4A16", ".weight_packed", as_floats, "packed tensor of .*down_proj.weight_packed has dtype torch.float32"),
    ("W4A16_ASYM", ".weight_zero_point", none, "down_proj.weight_zero_point is missing"),
    ("NVFP4", ".weight_global_scale", none, "down_proj.weight_global_scale is missing"),
    ("NVFP4", ".weight_global_scale", lambda tensor: tensor / 0, "factor of .*down_proj must be one number above 0"),
    ("ModelOpt NVFP4", ".weight_scale_2", none, "down_proj.weight_scale_2 is missing"),
    ("ModelOpt NVFP4", ".weight_scale_2", lambda tensor: tensor * 0, "factor of .*down_proj must be one number"),
    ("MXFP4", ".weight_scale", as_floats, "scales of .*down_proj have dtype torch.float32"),
    ("GPTQ", ".scales", none, "down_proj.scales is missing"),
    ("GPTQ", ".qzeros", none, "down_proj.qzeros is missing"),
    ("GPTQ", ".qzeros", cut, r"zero points of .*down_proj have shape \[128, 7\], and \[128, 8\] is needed"),
    ("GPTQ", ".g_idx", cut, "g_idx reorders the inputs, but desc_act is not true"),
    ("GPTQ desc_act", ".g_idx", none, "down_proj.g_idx is missing"),
    ("GPTQ desc_act", ".g_idx", cut, "do not give each of its 256 inputs to one group of 32"),
    ("GPTQ desc_act", ".g_idx", lambda tensor: tensor.clamp(0, 2), "do not give each of its 256 inputs to one group"),
    ("GPTQ desc_act", ".qweight", cut, "do not give each of its 248 inputs to one group"),
    ("AWQ", ".qweight", as_floats, "packed tensor of .*down_proj.qweight has dtype torch.float32"),
    ("AWQ", ".qzeros", none, "down_proj.qzeros is missing"),
])
def test_a_tensor_that_is_missing_or_does_not_fit_is_refused_by_name(name: str, suffix: str, change: Any, words: str,
                                                                     tmp_path: Path) -> None:
    def write(weight: torch.Tensor) -> Any:
        parts, numbers = files.FORMS[name].write(weight)
        made = change(parts.pop(suffix))
        return parts | ({} if made is None else {suffix: made}), numbers

    config = files.CONFIG | {"num_hidden_layers": 1}
    files.save_form(tmp_path / "quantised", files.Form(files.FORMS[name].settings, write, 8), config)
    with pytest.raises(WeightError, match=words):
        load(tmp_path / "quantised", dtype="float32")


@pytest.mark.parametrize("is_symmetric", [True, False])
def test_codes_of_4_bits_whose_last_group_is_short_are_dequantised(is_symmetric: bool) -> None:
    """A GPTQ file of a model with 576 inputs and groups of 128 has four and a half groups."""
    found = read_quantization(files.GPTQ | {"group_size": 128, "sym": is_symmetric})
    parts, _ = files.gptq(4, is_symmetric)(torch.randn(64, 576))
    groups = torch.arange(576) // 128
    tensors = parts | {".scales": parts[".scales"][:5], ".qzeros": parts[".qzeros"][:5], ".g_idx": groups.int()}
    values, zeros = (unpack("", parts[key], 4, axis).T.float() for key, axis in ((".qweight", 0), (".qzeros", 1)))
    wanted = (values - zeros[:, groups] - 1) * parts[".scales"].T.float()[:, groups]
    torch.testing.assert_close(found.join("x", tensors).dequantize(), wanted, rtol=0, atol=0)


def test_the_section_may_lie_in_a_file_of_its_own(tmp_path: Path) -> None:
    form = files.FORMS["ModelOpt FP8"]
    files.save_form(tmp_path / "quantised", form)
    (tmp_path / "quantised" / "config.json").write_text(json.dumps(files.CONFIG))
    (tmp_path / "quantised" / "hf_quant_config.json").write_text(json.dumps(
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}))
    model = load(tmp_path / "quantised")
    assert sum(isinstance(linear.format, ScaledLinear) for linear in find_modules([model], Linear)) == 8


def save_joint_mxfp4(folder: Path) -> files.Tensors:
    """A model whose files have the experts of a layer in two tensors. Returns the numbers, expert by expert."""
    tensors, numbers = files.plain_weights(files.MOE), {}
    for layer in range(2):
        experts = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (torch.stack([tensors.pop(f"{experts}.{at}.{part}_proj.weight") for at in range(4)])
                          for part in ("gate", "up", "down"))
        for name, joint in (("gate_up", torch.stack((gate, up), dim=2).flatten(1, 2)), ("down", down)):
            parts, made = files.mxfp4(joint)
            tensors |= {f"{experts}.{name}_proj_blocks": parts[".weight_packed"].unflatten(-1, (-1, 16)),
                        f"{experts}.{name}_proj_scales": parts[".weight_scale"]}
            rows = {"gate": made[:, ::2], "up": made[:, 1::2]} if name == "gate_up" else {"down": made}
            numbers |= {f"{experts}.{at}.{part}_proj.weight": of_all[at]
                        for part, of_all in rows.items() for at in range(4)}
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    files.save_folder(folder, tensors, files.MOE | {"quantization_config": settings})
    return {name: tensor for name, tensor in tensors.items() if "experts" not in name} | numbers


def test_joint_experts_of_a_file_keep_their_bits(tmp_path: Path) -> None:
    numbers = save_joint_mxfp4(tmp_path / "quantised")
    files.save_folder(tmp_path / "numbers", numbers, files.MOE)
    kept, dense = load(tmp_path / "quantised"), load(tmp_path / "numbers")
    assert isinstance(find_modules([kept], Experts)[0].format, ScaledExperts)
    assert not any(isinstance(linear.format, ScaledLinear) for linear in find_modules([kept], Linear))
    assert outcome(kept) == outcome(dense) == outcome(load(tmp_path / "quantised", keep_quantized=False))


def test_joint_experts_of_4_bits_have_gate_and_up_rows_in_turn() -> None:
    found = read_quantization({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    weight = torch.randn(3, 8, 64) * 0.05
    parts, numbers = files.mxfp4(weight)
    tensors = {"_blocks": parts[".weight_packed"].unflatten(-1, (-1, 16)), "_scales": parts[".weight_scale"]}
    plain = found.join("model.layers.0.mlp.experts.down_proj", tensors).dequantize()
    torch.testing.assert_close(plain, numbers, rtol=0, atol=0)
    joint = found.join("model.layers.0.mlp.experts.gate_up_proj", tensors).dequantize()
    torch.testing.assert_close(joint, torch.cat((numbers[:, ::2], numbers[:, 1::2]), dim=1), rtol=0, atol=0)


# Quantised at load


FEWEST = "outrider.formats.scaled.FEWEST_NUMBERS_IN_INT4"  # int4 codes smaller matrices in int8


@pytest.mark.parametrize(("quantization", "fewest", "bits", "error"), [
    ("fp8", 0, 8.4, 0.04), ("int4", 0, 5.1, 0.1), ("int4", 1 << 20, 8.6, 0.01)])
def test_an_unquantised_file_is_coded_matrix_by_matrix(quantization: str, fewest: int, bits: float, error: float,
                                                       tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FEWEST, fewest)
    folder = files.save_folder(tmp_path / "numbers", files.plain_weights(files.CONFIG), files.CONFIG)
    dense = load(folder)
    dense_bytes = sum(slot.nbytes for slot in dense.weights().values())
    model = load(folder, quantization=quantization)
    assert all(isinstance(linear.format, ScaledLinear) for linear in find_modules([model], Linear)), "the head too"
    assert kept_bits(model) < bits
    assert sum(slot.nbytes for slot in model.weights().values()) < dense_bytes / 4
    for linear, other in zip(find_modules([model], Linear), find_modules([dense], Linear), strict=True):
        made, weight = linear.format.dense(), other.format.dense()
        assert made is not None and weight is not None
        assert (made - weight).norm() / weight.norm() < error
    assert outcome(model) == outcome(model, speculative_config={"method": "ngram", "num_speculative_tokens": 2})
    dummy = load(folder, quantization=quantization, load_format="dummy")
    assert outcome(dummy)


@pytest.mark.parametrize("quantization", ["fp8", "int4"])
def test_loading_takes_less_memory_than_the_numbers_of_the_file(quantization: str, tmp_path: Path,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    config = files.CONFIG | {"hidden_size": 128, "intermediate_size": 512, "vocab_size": 1024}
    weights = {name: tensor.bfloat16() for name, tensor in files.plain_weights(config).items()}
    folder = files.save_folder(tmp_path / "numbers", weights, config)
    monkeypatch.setattr(scaled, "MAX_NUMBERS", 1 << 12)
    monkeypatch.setattr(loader, "MOST_WIDENED", 1 << 12)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        model = load(folder, dtype="bfloat16", quantization=quantization)
    result: Any = recorded.profiler
    changes = [event.nbytes() for event in result.kineto_results.events() if event.name() == "[memory]"]
    mapped = (folder / "model.safetensors").stat().st_size  # whose pages the system may drop
    most = max(accumulate(change for change in changes if abs(change) != mapped))
    assert sum(slot.nbytes for slot in model.weights().values()) < most, "the profiler sees the model's memory"
    assert most < sum(tensor.nbytes for tensor in weights.values())


def coded(code: str, group: int, has_zeros: bool = False, inputs: int = 256) -> scaled.Scaled:
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(0, 256, (37, inputs // scaled.codes_per_byte(code)), generator=generator, dtype=torch.uint8)
    codes[codes & 127 == 127] = 1  # NaN in fp8
    groups = -(-inputs // group), 37
    zeros = torch.randint(-8, 8, groups, generator=generator).half().T if has_zeros else None
    scales = torch.rand(groups, generator=generator).T
    factors = torch.rand(37, 1, generator=generator) if code == "fp4" and group == 16 else None
    return scaled.Scaled(code, group, codes.view(scaled.code_dtype(code)), scales, zeros, factors)


@pytest.mark.parametrize("code", ["int4", "int8"])
def test_codes_are_packed_some_rows_at_a_time(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    need_native()
    at_once = packed_rows(coded(code, 32))
    monkeypatch.setattr(scaled_on_host, "PACKED_AT_ONCE", 256 * native.packed_lanes())
    in_pieces = packed_rows(coded(code, 32))
    assert at_once is not None and in_pieces is not None and torch.equal(at_once.data, in_pieces.data)


CODED = [("int4", 32, False), ("int4", 128, True), ("int8", 64, False), ("int8", 256, False), ("fp4", 32, False),
         ("fp4", 16, False), ("fp8", 256, False), ("fp8", 128, False), ("fp8", 32, False)]


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 9, 65])
@pytest.mark.parametrize(("code", "group", "has_zeros"), CODED)
def test_native_products_with_codes_are_those_with_their_numbers(code: str, group: int, has_zeros: bool,
                                                                 num_tokens: int) -> None:
    need_native()
    weight, generator = coded(code, group, has_zeros), torch.Generator().manual_seed(4)
    x, bias = torch.randn(num_tokens, 256, generator=generator), torch.randn(37, generator=generator)
    held, numbers = host_weight(weight, bias, allow_copy=True), weight.numbers()
    assert held is not None and (held.rows is None) == (code == "fp8" or group == 16)
    made, dense = native.product(x, held.matrix), native.dense_matrix(numbers, bias)
    assert dense is not None
    if code in ("fp8", "fp4") and held.rows is None and weight.factors is None:
        assert torch.equal(made, native.product(x, dense)), "the bits of the numbers' product"
    magnitudes = x.abs().double() @ numbers.abs().double().T + bias.abs()
    assert ((made - native.product(x, dense)).abs() / magnitudes).max() < 2e-6


@pytest.mark.parametrize("weight", [coded("int8", 64, has_zeros=True), coded("int4", 16), coded("fp8", 24, inputs=96)],
                         ids=["int8 with zero points", "groups of 16", "groups that are no whole vectors"])
def test_codes_that_native_products_do_not_read_become_numbers(weight: scaled.Scaled) -> None:
    assert host_weight(weight, None, allow_copy=True) is None


@pytest.mark.parametrize("inputs", [33, 100, 576])
def test_native_products_with_fp8_take_any_number_of_inputs(inputs: int) -> None:
    need_native()
    weight = coded("fp8", 128 if inputs > 128 else inputs, inputs=inputs)
    held, dense = host_weight(weight, None, allow_copy=False), native.dense_matrix(weight.numbers())
    assert held is not None and dense is not None
    for num_tokens in (1, 3, 20):
        x = torch.randn(num_tokens, inputs, generator=torch.Generator().manual_seed(1))
        assert torch.equal(native.product(x, held.matrix), native.product(x, dense))


def need_native() -> None:
    if not native.available():
        pytest.skip(native.reason())


@pytest.fixture
def packing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor on which kept bits are fast."""
    need_native()
    for module in ("kernels.scaled_on_host", "formats.scaled", "formats.gguf"):
        monkeypatch.setattr(f"outrider.{module}.kept_bits_are_fast", lambda: True)


@pytest.mark.parametrize(("quantization", "fewest"), [("int4", 0), ("int4", 1 << 20), ("fp8", 0)])
def test_a_cpu_multiplies_with_codes_by_native_code(quantization: str, fewest: int, packing: None, tmp_path: Path,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FEWEST, fewest)
    folder = files.save_folder(tmp_path / "numbers", files.plain_weights(files.CONFIG), files.CONFIG)
    model = load(folder, dtype="float32", quantization=quantization, activation_bits=32)
    for linear in find_modules([model], Linear):
        x = torch.randn(3, linear.in_features, generator=torch.Generator().manual_seed(1))
        plain, plain_wide = linear.format.product(x), linear.format.wide(x)
        assert linear.format.native_product() is None
        copied = linear.format.prepare(True)
        assert (copied >= linear.in_features * linear.out_features // 2) == (quantization == "int4")
        assert linear.format.native_product() is not None
        torch.testing.assert_close(linear.format.product(x), plain, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(linear.format.wide(x), plain_wide, rtol=1e-4, atol=1e-5)
        if quantization == "int4":
            assert linear.format.prepare(False) == 0 and linear.format.native_product() is None
    assert outcome(model) == outcome(model, packed_weights=False) == outcome(model, exact=True)


def test_activations_of_8_bits_go_with_codes_too(packing: None, tmp_path: Path,
                                                 caplog: pytest.LogCaptureFixture) -> None:
    folder = files.save_folder(tmp_path / "numbers", files.plain_weights(files.CONFIG), files.CONFIG)
    exact, rounded = (load(folder, dtype="float32", quantization="int4", activation_bits=bits) for bits in (32, 8))
    assert "activation_bits=8: 9 of 9 weights" in caplog.text
    x = torch.randn(2, exact.lm_head.in_features, generator=torch.Generator().manual_seed(1))
    close, far = (model.lm_head.format for model in (exact, rounded))
    assert close.prepare(True) == far.prepare(False) > 0, "rounded token rows have no product without a copy"
    error = (close.product(x) - far.product(x)).abs().max() / close.product(x).abs().max()
    assert 1e-4 < error < 2e-2
    with pytest.raises(ValueError, match="activation_bits=8 finds no weights that it could be used with"):
        load(folder, dtype="float32", quantization="fp8", activation_bits=8)


@pytest.mark.parametrize(("name", "rounds"), [("fp8 blocks", False), ("W4A16", True), ("NVFP4", False),
                                              ("MXFP4", True)])
def test_experts_are_multiplied_by_native_code(name: str, rounds: bool, packing: None, tmp_path: Path) -> None:
    files.save_form(tmp_path / "quantised", files.FORMS[name], files.MOE)
    model = load(tmp_path / "quantised", dtype="float32")
    experts = find_modules([model], Experts)[0].format
    generator = torch.Generator().manual_seed(1)
    x, ids = torch.randn(5, 128, generator=generator), torch.randint(0, 4, (5, 2), generator=generator)
    routed = moe.Routed(ids, torch.rand(5, 2, generator=generator))
    by_numbers = experts.mix(x, routed, "silu")
    assert experts.prepare(True) > 0
    native_sums = experts.mix(x, routed, "silu")
    torch.testing.assert_close(native_sums, by_numbers, rtol=1e-4, atol=1e-5)
    assert torch.equal(native_sums[:1], experts.mix(x[:1], moe.Routed(ids[:1], routed.weights[:1]), "silu"))
    error = experts.use_activation_bits(8)
    assert (error is not None) == rounds
    experts.prepare(False)
    rounded = experts.mix(x, routed, "silu")
    assert not torch.equal(rounded, native_sums) if rounds else torch.allclose(rounded, by_numbers, 1e-4, 1e-5)
    assert outcome(model) == outcome(model, exact=True)


@pytest.mark.parametrize(("inputs", "outputs", "kind", "group", "has_offsets"), [
    (4096, 4096, "int4", 128, False), (192, 1 << 17, "int4", 64, False), (96, 1 << 18, "int4", 32, False),
    (4096, 4064, "int4", 32, True), (1024, 1024, "int4", 32, True), (32, 1 << 15, "int4", 32, False),
    (1024, 1008, "int8", 32, False)])
def test_int4_takes_the_largest_group_that_divides_the_inputs_of_a_large_matrix(
    inputs: int, outputs: int, kind: str, group: int, has_offsets: bool
) -> None:
    declared = Linear(inputs, outputs, bias=False, dtype=torch.float32, device=torch.device("meta")).declared
    made, experts = choose_made("int4", declared), choose_made("int4", declared, declared)
    assert made is not None and (made.kind, made.group, made.has_offsets) == (kind, group, has_offsets)
    assert experts is not None and experts.kind == "int4" and not experts.has_offsets, "small matrices, but many"


@pytest.mark.parametrize("outputs", [64, 1 << 18])
def test_int4_leaves_matrices_whose_inputs_no_group_divides(outputs: int) -> None:
    layer = Linear(80, outputs, bias=False, dtype=torch.float32, device=torch.device("meta"))
    assert choose_made("int4", layer.declared) is None


@pytest.mark.parametrize(("inputs", "outputs", "device", "rounding"), [
    (2048, 2048, "cuda", (2048, 128)), (64, 1 << 16, "cuda", (64, 64)), (2048, 2032, "cuda", (0, 0)),
    (2048, 2048, "cpu", (0, 0))])
def test_token_rows_are_rounded_for_large_matrices_on_a_gpu(inputs: int, outputs: int, device: str,
                                                            rounding: tuple[int, int]) -> None:
    declared = Linear(inputs, outputs, bias=False, dtype=torch.float32, device=torch.device("meta")).declared
    declared = replace(declared, device=torch.device(device))
    assert tuple(ScaledFormat("fp8", group, rounds=True).rounding(declared) for group in (0, 128)) == rounding
    assert ScaledFormat("fp8").rounding(declared) == 0


@pytest.mark.parametrize("rounds", [False, True])
def test_the_cpu_multiplies_as_the_reference_says(rounds: bool) -> None:
    """Experts of codes: with token rows as they are, and rounded to fp8 before each projection."""
    gate_up, down = (ScaledFormat("fp8").make(torch.randn(shape)).weight for shape in ((3, 40, 24), (3, 24, 20)))
    x, added, routed = torch.randn(5, 24), torch.randn(5, 24), moe.route(torch.randn(5, 3), moe.RouteRule(3, 2))
    given = x, routed.ids, routed.weights, gate_up, down, "silu", added, rounds
    found, wanted = experts_on_host.scaled_experts(*given), moe.scaled_experts(*given)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert torch.equal(moe.scaled_experts(*given[:-1]), wanted) is not rounds


@pytest.mark.parametrize(("quantization", "error"), [("fp8", 0.04), ("int4", 0.2)])
@pytest.mark.parametrize("is_joint", [False, True], ids=["by expert", "joint"])
def test_experts_are_coded_matrix_by_matrix(quantization: str, error: float, is_joint: bool, tmp_path: Path) -> None:
    """Files have experts joint or one by one, whichever of these the model has slots for."""
    experts = Experts(3, 64, 32, activation="silu", is_fused=is_joint, dtype=torch.float64, device=torch.device("cpu"))
    first, down = torch.randn(3, 64, 64), torch.randn(3, 64, 32)
    stored = {"mlp.experts.gate_up_proj": first, "mlp.experts.down_proj": down}
    experts.declare_formats(FormatChoice(lambda name: None, torch.device("cpu"), quantization), "mlp.experts")
    slots = experts.weights("mlp.experts")
    assert isinstance(experts.format, ScaledExperts)
    for name, tensor in loader.one_by_one(stored.items(), slots, Counter()):
        slots.pop(name).store(tensor)
    assert not slots
    x, routed = torch.randn(5, 64).double(), moe.Routed(torch.tensor([[0, 2]] * 5), torch.ones(5, 2))
    wanted = moe.experts(x, routed.ids, routed.weights, first.double(), down.double(), "silu")
    assert (experts.format.mix(x, routed, "silu") - wanted).norm() / wanted.norm() < 2 * error


@pytest.mark.parametrize(("quantization", "error"), [("fp8", 0.08), ("int4", 0.3)])
@pytest.mark.parametrize("family", ["gpt_oss", "llama4"])
def test_experts_that_are_stored_input_by_output_are_turned_before_they_are_coded(
        family: str, quantization: str, error: float, tmp_path: Path) -> None:
    folder = oracle.make_folder(family, tmp_path / family)
    dense, model = load(folder, dtype="float32"), load(folder, dtype="float32", quantization=quantization)
    pairs = list(zip(find_modules([dense], Experts), find_modules([model], Experts), strict=True))
    assert pairs and all(isinstance(coded.format, ScaledExperts) for _, coded in pairs)
    for numbers, coded in pairs:
        x = torch.randn(5, numbers.declared.hidden_size)
        routed = moe.Routed(torch.tensor([[0], [1], [2], [1], [0]]), torch.ones(5, 1))
        wanted, found = (each.format.mix(x, routed, each.activation, None, *filter(None, [each.biases]))
                         for each in (numbers, coded))
        assert (found - wanted).norm() / wanted.norm() < error


def test_routers_and_quantised_files_are_left_as_they_are(tmp_path: Path) -> None:
    folder = files.save_folder(tmp_path / "numbers", files.plain_weights(files.MOE), files.MOE)
    model = load(folder, quantization="fp8")
    assert all(isinstance(experts.format, ScaledExperts) for experts in find_modules([model], Experts))
    assert outcome(model)
    assert not any(isinstance(router.gate.format, ScaledLinear) for router in find_modules([model], Router))
    files.save_form(tmp_path / "quantised", files.FORMS["W4A16"])
    model = load(tmp_path / "quantised", quantization="fp8")
    assert not isinstance(model.lm_head.format, ScaledLinear)
    with pytest.raises(ValueError, match="quantization='fp8' needs keep_quantized"):
        load(folder, quantization="fp8", keep_quantized=False)


def test_a_device_without_a_product_refuses_the_quantization(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = files.save_folder(tmp_path / "numbers", files.plain_weights(files.CONFIG), files.CONFIG)
    monkeypatch.setattr(ScaledLinear, "serves", classmethod(lambda *_: False))
    with pytest.raises(ValueError, match="quantization='fp8': there is no kernel for torch.float64 with such weights"):
        load(folder, quantization="fp8")


def test_a_model_without_a_layer_that_int4_can_code_refuses_the_quantization(tmp_path: Path) -> None:
    config = files.CONFIG | {"hidden_size": 48, "intermediate_size": 80, "head_dim": 12}
    folder = files.save_folder(tmp_path / "numbers", files.plain_weights(config), config)
    with pytest.raises(ValueError, match=r"quantization='int4': no linear layer .* groups of \(128, 64, 32\) divide"):
        load(folder, quantization="int4")


def test_an_empty_section_does_not_keep_numbers_from_being_coded(tmp_path: Path) -> None:
    config = files.CONFIG | {"quantization_config": None}
    folder = files.save_folder(tmp_path / "numbers", files.plain_weights(config), config)
    model = load(folder, quantization="fp8")
    assert all(isinstance(linear.format, ScaledLinear) for linear in find_modules([model], Linear))


@pytest.mark.parametrize(("name", "settings", "words"), [
    ("FP8_DYNAMIC", {}, r"weights: {kept} MiB in fp8 rows, {plain} MiB in float64"),
    ("W4A16", {}, r"weights: {plain} MiB in float64, {kept} MiB in int4 groups"),
    ("GPTQ desc_act", {}, r"weights: {plain} MiB in float64; expanded to float64: 14 of gptq_ordered"),
    ("FP8_DYNAMIC", {"keep_quantized": False}, r"weights: {plain} MiB in float64; expanded to float64: 14 of fp8"),
])
def test_start_up_says_in_one_line_what_is_kept_and_what_is_expanded(
        name: str, settings: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(loader, "MIB", 1)
    files.save_form(tmp_path / "quantised", files.FORMS[name])
    with caplog.at_level("INFO", "outrider"):
        model = load(tmp_path / "quantised", **settings)
    slots = model.weights()
    kept = sum(slot.nbytes for name, slot in slots.items() if slot.kind or name.endswith("weight_scale"))
    total = sum(slot.nbytes for slot in slots.values())
    (line,) = [record for record in caplog.records if record.message.startswith("weights: ")]
    assert line.message == words.format(kept=kept, plain=total - kept)
    assert line.levelname == ("WARNING" if "expanded" in words else "INFO")


@pytest.mark.parametrize(("quantization", "share"), [("fp8", 0.35), ("int4", 0.25)])
def test_the_floor_of_a_benchmark_counts_the_bytes_that_are_kept(
    quantization: str, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FEWEST, 0)
    folder = files.save_folder(tmp_path / "numbers", files.plain_weights(files.CONFIG), files.CONFIG)
    plain, coded = (Traffic(load(folder, dtype="float32", **settings)).weights.dense
                    for settings in ({}, {"quantization": quantization}))
    assert coded < share * plain


@pytest.mark.parametrize(("name", "group"), [("FP8_DYNAMIC", 128), ("fp8 blocks", 0), ("W4A16", 0)])
def test_norms_round_token_rows_for_experts(name: str, group: int, tmp_path: Path) -> None:
    """As on a GPU. In blocks of 128 inputs experts round token rows by themselves."""
    files.save_form(tmp_path / "quantised", files.FORMS[name], files.MOE | {"intermediate_size": 128})
    model = load(tmp_path / "quantised", dtype="float32")
    for layer in model.layers:
        assert isinstance(layer, PreNormLayer) and isinstance(layer.mlp, MoE)
        experts = layer.mlp.experts.format
        assert isinstance(experts, ScaledExperts) and experts.rounding == 0, "a CPU rounds nothing"
        experts._rounds = name.lower().startswith("fp8")
        assert experts.rounding == group and layer.mlp.readers() == [experts]
        layer.prepare()
        assert layer.mlp_norm._hint == ((group,) if group else ())
        experts.set_exact(True)
        assert experts.rounding == 0


def test_codes_in_another_order_are_put_back_before_some_are_updated() -> None:
    """The order of a GPU's int4 codes, made on the CPU: rows are right in it, and an update finds the file's order."""
    stored = ScaledFormat("int4", 128, torch.bfloat16)
    layer = FusedLinear(256, {"q": 64, "k": 128}, bias=False, dtype=torch.float64, device=torch.device("cpu"))
    held = ScaledLinear(layer.declared, [stored])
    numbers = torch.randn(192, 256, generator=torch.Generator().manual_seed(1))

    def store(name: str, numbers: torch.Tensor) -> None:
        made = scaled.to_int4_groups(numbers, 128)
        slots = held.slots("")
        slots[f"{name}.weight"].target.copy_(made.codes)
        slots[f"{name}.weight_scale"].target.copy_(made.scales)

    store("q", numbers[:64])
    store("k", numbers[64:])
    held.finalize()
    held.set_exact(False)
    held._arrange = lambda weight, dtype: weight.tiled()  # type: ignore[assignment]
    held.prepare(False)
    held.prepare(False)  # a model may be prepared again
    assert held._weight.is_tiled
    every = torch.arange(192)
    wanted = scaled.to_int4_groups(numbers, 128).numbers().double()
    assert torch.equal(held.look_up(every), wanted)
    held.restore_order()
    store("q", -numbers[:64])
    held.finalize()
    held.prepare(False)
    wanted[:64] = scaled.to_int4_groups(-numbers[:64], 128).numbers().double()
    assert held._weight.is_tiled and torch.equal(held.look_up(every), wanted)
