"""Files with `quant_method: compressed-tensors`: groups of modules, each with a scheme of its weights and activations.

Weights are read as codes with scales. If weights are fp8 and the scheme rounds activations, activations are rounded to
fp8 with a scale for each token row. Other activations are not rounded, which is more precise than the scheme."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.models.config_reader import ConfigReader
from outrider.models.sources.model_source import WeightError
from outrider.models.sources.quantization import KEY, ModuleNames, Quantization, is_module

if TYPE_CHECKING:
    import torch

    from outrider.formats import StoredFormat, StoredWeight

BLOCK = 128
# How weights lie in the files, by `format`: the suffix of the codes, and the pairs of type and bits that it may hold.
FORMATS = {
    "float-quantized": (".weight", [("float", 8)]),
    "int-quantized": (".weight", [("int", 8)]),
    "naive-quantized": (".weight", [("float", 8), ("int", 8)]),
    "mxfp8-quantized": (".weight", [("float", 8)]),
    "pack-quantized": (".weight_packed", [("int", 4), ("int", 8)]),
    "nvfp4-pack-quantized": (".weight_packed", [("float", 4)]),
    "mxfp4-pack-quantized": (".weight_packed", [("float", 4)]),
}
# Inputs of a group, where the format fixes it.
FIXED_GROUPS = {"nvfp4-pack-quantized": 16, "mxfp4-pack-quantized": 32, "mxfp8-quantized": 32}
# Of activations, whose scales are made anew for each token row.
ARGUMENTS = ("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic", "actorder")
MADE_BY = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")


@dataclass(frozen=True)
class Scheme:
    """The way in which the weights of one group of modules are stored."""

    targets: tuple[str, ...]
    form: str
    code: str  # see kernels.scaled
    bits: int
    group: int  # inputs that share a scale; 0 if all of an output do
    block: int  # outputs that share a scale
    is_symmetric: bool
    is_ordered: bool  # inputs are given to groups by their importance
    rounds: bool  # activations are rounded


def read_scheme(reader: ConfigReader, default_format: str | None) -> Scheme:
    reader.required("targets", list)
    targets = tuple(ModuleNames(reader, "targets").patterns)
    reader.must_equal("output_activations", None)
    form = reader.raw("format") or default_format
    if form not in FORMATS:
        raise reader.refusal("format", f"{form!r} is not one of {', '.join(FORMATS)}")
    weights = reader.section("weights")
    weights.passes_over(*MADE_BY)
    kind = weights.must_equal("type", "int", "float", default="int"), weights.required("num_bits", int)
    if kind not in FORMATS[form][1]:
        raise weights.refusal("num_bits", f"the format {form} with type {kind[0]!r} is supported for "
                              + " or ".join(f"{bits} bits of {name}" for name, bits in FORMATS[form][1]))
    if weights.raw("dynamic"):
        raise weights.refusal("dynamic", "it must be false, because weights have fixed scales")
    symmetric = weights.get("symmetric", bool, True)
    if not symmetric and kind[0] == "float":
        raise weights.refusal("symmetric", "it must be true, because weights of type float have no zero points")
    group, block = _sizes(weights, form)
    order = weights.must_equal("actorder", None, False, "weight", "static", "group", "dynamic")
    inputs = reader.section_or_empty("input_activations")
    inputs.passes_over(*ARGUMENTS, *MADE_BY)
    code = {("float", 8): "fp8", ("int", 8): "int8", ("int", 4): "int4", ("float", 4): "fp4"}[kind]
    rounds = code == "fp8" and bool(inputs.values) and form != "mxfp8-quantized"
    return Scheme(targets, form, code, kind[1], group, block, symmetric, order in ("group", "dynamic"), rounds)


def _sizes(weights: ConfigReader, form: str) -> tuple[int, int]:
    """Return the numbers of inputs (0: all) and outputs that share a scale."""
    strategy = weights.must_equal("strategy", "tensor", "channel", "group", "block", "tensor_group", default="tensor")
    given = weights.raw("group_size")
    if strategy in ("tensor", "channel"):
        if given not in (None, -1):
            raise weights.refusal("group_size", f"it must be null with the strategy {strategy}")
        weights.must_equal("block_structure", None)
        sizes = 0, 1
    elif strategy == "block":
        weights.must_equal("block_structure", [BLOCK, BLOCK])
        sizes = BLOCK, BLOCK
    else:
        weights.must_equal("block_structure", None)
        sizes = weights.required("group_size", int), 1
    if (fixed := FIXED_GROUPS.get(form, sizes[0])) != sizes[0]:
        raise weights.refusal("group_size", f"it must be {fixed} in the format {form}")
    if sizes[0] and form in ("int-quantized", "naive-quantized"):
        raise weights.refusal("strategy", f"it must be tensor or channel in the format {form}")
    if strategy == "block" and form != "float-quantized":
        raise weights.refusal("strategy", "block is supported in the format float-quantized only")
    return sizes


class CompressedTensors(Quantization):
    beside = (".weight_scale", ".input_scale", ".weight_zero_point", ".weight_shape", ".weight_g_idx",
              ".weight_global_scale", ".input_global_scale", ".input_zero_point")

    def __init__(self, settings: Mapping[str, Any]) -> None:
        reader = ConfigReader(settings, KEY)
        reader.passes_over("quant_method", "version", "global_compression_ratio", "kv_cache_scheme")
        reader.must_equal("quantization_status", "compressed", default="compressed")
        for key in ("sparsity_config", "transform_config"):
            section = reader.get(key, dict, {})
            if any(section.values()) and section.get("format") != "dense":
                raise reader.refusal(key, "sparse or rotated weights cannot be read")
        self._plain = ModuleNames(reader, "ignore")
        form = reader.optional("format", str)
        groups = reader.section("config_groups")
        default = None if form == "mixed-precision" else form
        if default not in (None, *FORMATS):
            raise reader.refusal("format", f"supported: {', '.join(FORMATS)}")
        self._schemes = [read_scheme(groups.section(name), default) for name in groups.values]
        suffixes = {FORMATS[scheme.form][0] for scheme in self._schemes}
        if len(suffixes) != 1:
            raise reader.refusal("config_groups", "all groups must be in one format",
                                 "Quantise the model again, with one format for all groups.")
        self.suffix = suffixes.pop()
        reader.refuse_unread()

    def _scheme(self, name: str) -> Scheme | None:
        if name in self._plain:
            return None
        named = (s for s in self._schemes if any(t != "Linear" and is_module(t, name) for t in s.targets))
        return next(named, None) or next((s for s in self._schemes if "Linear" in s.targets), None)

    def stored_format(self, name: str) -> StoredFormat | None:
        import torch

        from outrider.formats import StoredFormat
        from outrider.formats.scaled import ScaledFormat

        scheme = self._scheme(name)
        if scheme is None:
            return None
        if scheme.is_ordered:
            return StoredFormat("gptq_ordered")
        is_nvfp4 = scheme.form == "nvfp4-pack-quantized"
        dtype = torch.float8_e4m3fn if is_nvfp4 else torch.bfloat16 if scheme.form.startswith("mx") else torch.float32
        return ScaledFormat(scheme.code, scheme.group, dtype, not scheme.is_symmetric, is_nvfp4, scheme.rounds)

    def join(self, name: str, tensors: Mapping[str, torch.Tensor]) -> StoredWeight:
        from outrider.models.sources import scaled_weights

        scheme = self._scheme(name)
        if scheme is None:
            raise WeightError(f"{name} has scales in the files, but {KEY} says that it is not quantised (ignore, "
                              f"targets): fetch the files again, or correct {KEY}")
        codes, scales = tensors[self.suffix], tensors[".weight_scale"]
        match scheme.code:
            case "fp8":
                return scaled_weights.fp8_weight(name, codes, scales, scheme.group, scheme.block)
            case "fp4":
                factor = tensors[".weight_global_scale"] if scheme.form.startswith("nv") else None
                return scaled_weights.fp4_weight(name, codes, scales, scheme.group,
                                                 None if factor is None else 1 / factor.float())
            case "int8" if self.suffix == ".weight":
                zeros = None if scheme.is_symmetric else tensors[".weight_zero_point"]
                return scaled_weights.int8_weight(name, codes, scales, zeros)
            case _:
                return self._packed(name, scheme, tensors)

    def _packed(self, name: str, scheme: Scheme, tensors: Mapping[str, torch.Tensor]) -> StoredWeight:
        from outrider.formats.scaled import ScaledWeight
        from outrider.models.sources.integer_groups import OrderedWeight
        from outrider.models.sources.scaled_weights import integer_groups, order_by_groups, unpack

        values = unpack(f"{name}.weight_packed", tensors[".weight_packed"], scheme.bits, 1)
        outputs, padded = values.shape
        shape = tensors[".weight_shape"].tolist()
        inputs = shape[1] if isinstance(shape, list) and len(shape) == 2 and shape[0] == outputs else None
        if not isinstance(inputs, int) or not 0 <= padded - inputs < 32 // scheme.bits:
            raise WeightError(f"{name}.weight_shape is {shape}, but {name}.weight_packed holds {outputs} x {padded} "
                              "codes: fetch the files again, or quantise the model again")
        values = values[:, :inputs]
        zeros = None
        if not scheme.is_symmetric:
            points = tensors[".weight_zero_point"]
            zeros = unpack(f"{name}.weight_zero_point", points, scheme.bits, 0)[:outputs]
        groups, scales = tensors.get(".weight_g_idx"), tensors[".weight_scale"]
        is_sorted = not scheme.is_ordered or groups is None or bool((groups < 0).all())
        order = None if is_sorted or groups is None else order_by_groups(name, groups, inputs, scheme.group or inputs)
        values = values if order is None else values[:, order]
        made = integer_groups(name, values, scheme.bits, scheme.group, scales, zeros)
        return OrderedWeight(made, order) if scheme.is_ordered else ScaledWeight(made)
