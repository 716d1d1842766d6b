"""Files of GPTQ and AWQ: integers of 4 or 8 bits in groups of inputs, packed into int32 words.

A GPTQ file with `desc_act` gives neighbouring inputs to different groups; such a matrix is dequantised.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.models.config_reader import ConfigReader
from outrider.models.sources.model_source import WeightError
from outrider.models.sources.quantization import KEY, ModuleNames, Quantization

if TYPE_CHECKING:
    import torch

    from outrider.formats import StoredFormat, StoredWeight

# Keys that say how a file was made, or what another engine runs it with.
MADE_BY = """damp_percent damp_auto_increment true_sequential static_groups model_name_or_path model_file_base_name
    meta backend version tokenizer dataset block_name_to_quantize module_name_preceding_first_block batch_size
    exllama_config max_input_length modules_in_block_to_quantize use_cuda_fp16 cache_block_outputs disable_exllama
    use_exllama quantizer lm_head model_seqlen do_fuse fuse_max_seq_len modules_to_fuse nsamples mse
    act_group_aware hyb_act pack_impl""".split()
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble of a word that holds each of its columns


class IntegerGroups(Quantization):
    suffix = ".qweight"
    beside = (".scales", ".qzeros", ".g_idx")

    def _read_sizes(self, reader: ConfigReader, bits_key: str, group_key: str, *bits: int) -> None:
        self._bits = reader.must_equal(bits_key, *bits)
        given = reader.raw(group_key)
        if not isinstance(given, int) or isinstance(given, bool) or not (given == -1 or given > 0):
            raise reader.refusal(group_key, "it must be the number of inputs in a group, or -1 for one group per row")
        self._group = max(given, 0)
        self._plain = ModuleNames(reader, "modules_to_not_convert")

    def _kept(self, name: str, has_zeros: bool) -> StoredFormat | None:
        from outrider.formats.scaled import ScaledFormat

        return None if name in self._plain else ScaledFormat(f"int{self._bits}", self._group, has_zeros=has_zeros)


class GptqFiles(IntegerGroups):
    def __init__(self, settings: Mapping[str, Any]) -> None:
        reader = ConfigReader(settings, KEY)
        reader.passes_over("quant_method", *MADE_BY)
        self._read_sizes(reader, "bits", "group_size", 4, 8)
        self._is_ordered = reader.get("desc_act", bool, False)
        self._is_symmetric = reader.get("sym", bool, True)
        form = reader.must_equal("checkpoint_format", "gptq", "gptq_v2", default="gptq")
        self._zero_offset = 1 if form == "gptq" else 0
        reader.must_equal("pack_dtype", "int32", default="int32")
        reader.must_equal("is_marlin_format", False, default=False)
        if reader.raw("dynamic"):
            raise reader.refusal("dynamic", "settings for single modules are not supported",
                                 "Quantise the model again with one setting for all modules.")
        reader.refuse_unread()

    def stored_format(self, name: str) -> StoredFormat | None:
        from outrider.formats import StoredFormat

        return StoredFormat("gptq_ordered") if self._is_ordered else self._kept(name, not self._is_symmetric)

    def join(self, name: str, tensors: Mapping[str, torch.Tensor]) -> StoredWeight:
        import torch

        from outrider.formats.scaled import ScaledWeight
        from outrider.models.sources.scaled_weights import integer_groups, order_by_groups, require_groups, unpack

        values = unpack(f"{name}.qweight", tensors[".qweight"], self._bits, 0).T
        outputs, inputs = values.shape
        width = self._group or inputs
        zeros = unpack(f"{name}.qzeros", tensors[".qzeros"], self._bits, 1).T[:outputs] + self._zero_offset
        require_groups(name, "zero points", zeros, outputs, -(-inputs // width))
        groups = tensors[".g_idx"] if self._is_ordered else tensors.get(".g_idx")
        if self._is_symmetric and not bool((zeros == 1 << self._bits - 1).all()):
            raise WeightError(f"{name}.qzeros has zero points other than the middle of the range, but sym is true: "
                              "correct sym in quantization_config, or quantise the model again")
        order = None
        if groups is not None and not torch.equal(groups.long(), torch.arange(inputs) // width):
            if not self._is_ordered:
                raise WeightError(f"{name}.g_idx reorders the inputs, but desc_act is not true: correct desc_act in "
                                  "quantization_config, or quantise the model again")
            order = order_by_groups(name, groups, inputs, width)
            values = values[:, order]
        made = integer_groups(name, values, self._bits, self._group, tensors[".scales"].T,
                              None if self._is_symmetric else zeros)
        return OrderedWeight(made, order) if self._is_ordered else ScaledWeight(made)


@dataclass(frozen=True)
class OrderedWeight:
    """A matrix whose columns are sorted by their groups. It is always dequantised."""

    weight: Any  # kernels.scaled.Scaled, which is imported with torch
    order: torch.Tensor | None  # the file's column of each sorted one
    kind: str = "gptq_ordered"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.weight.shape)

    def parts(self) -> dict[str, torch.Tensor]:
        return {}

    def is_finite(self) -> bool:
        return bool(self.weight.scales.isfinite().all())

    def dequantize(self) -> torch.Tensor:
        numbers: torch.Tensor = self.weight.numbers()
        return numbers if self.order is None else numbers[:, self.order.argsort()]


class AwqFiles(IntegerGroups):
    def __init__(self, settings: Mapping[str, Any]) -> None:
        reader = ConfigReader(settings, KEY)
        reader.passes_over("quant_method", *MADE_BY)
        names = ("w_bit", "q_group_size") if reader.has("w_bit") else ("bits", "group_size")
        self._read_sizes(reader, *names, 4)
        reader.must_equal("zero_point", True, default=True)
        reader.passes_over("version")
        if str(reader.raw("version") or "gemm").lower() != "gemm":
            raise reader.refusal("version", "supported: 'gemm'")
        reader.refuse_unread()

    def stored_format(self, name: str) -> StoredFormat | None:
        return self._kept(name, has_zeros=True)

    def join(self, name: str, tensors: Mapping[str, torch.Tensor]) -> StoredWeight:
        from outrider.formats.scaled import ScaledWeight
        from outrider.models.sources.scaled_weights import integer_groups, unpack

        values, zeros = (unpack(name + key, tensors[key], 4, 1).unflatten(1, (-1, 8))[..., AWQ_ORDER].flatten(1).T
                         for key in (".qweight", ".qzeros"))
        return ScaledWeight(integer_groups(name, values, 4, self._group, tensors[".scales"].T, zeros))
