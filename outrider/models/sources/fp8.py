"""Files with `quant_method: fp8` or `fbgemm_fp8`: e4m3 numbers with a scale for a matrix, an output or a block of 128 x
128.

The files' static activation scales, and upper limits of dynamic ones, are ignored: every token row has its own scale,
which is at least as fine. The type of the KV cache is a separate setting.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from outrider.models.config_reader import ConfigReader
from outrider.models.sources.quantization import KEY, ModuleNames, Quantization

if TYPE_CHECKING:
    import torch

    from outrider.formats import StoredFormat, StoredWeight

BLOCK = 128


class Fp8Files(Quantization):
    def __init__(self, settings: Mapping[str, Any]) -> None:
        reader = ConfigReader(settings, KEY)
        reader.passes_over("quant_method", "activation_scale_ub", "kv_cache_scheme")
        scheme = reader.must_equal("activation_scheme", "dynamic", "static", default="dynamic")
        self._is_in_blocks = reader.has("weight_block_size")
        if self._is_in_blocks:
            reader.must_equal("weight_block_size", [BLOCK, BLOCK])
        if self._is_in_blocks and scheme == "static":
            raise reader.refusal("activation_scheme", "it must be dynamic for weights with block scales "
                                                      "(weight_block_size)")
        reader.must_equal("fmt", "e4m3", default="e4m3")
        reader.must_equal("scale_fmt", "ue8m0", "float", default="float")
        self._plain = ModuleNames(reader, "modules_to_not_convert", "ignored_layers")
        reader.refuse_unread()
        self.beside = (".weight_scale_inv" if self._is_in_blocks else ".weight_scale", ".input_scale")

    def stored_format(self, name: str) -> StoredFormat | None:
        from outrider.formats.scaled import ScaledFormat

        group = BLOCK if self._is_in_blocks else 0
        return None if name in self._plain else ScaledFormat("fp8", group, rounds=True)

    def join(self, name: str, tensors: Mapping[str, torch.Tensor]) -> StoredWeight:
        from outrider.models.sources.scaled_weights import fp8_weight

        size = (BLOCK, BLOCK) if self._is_in_blocks else (0, 1)
        return fp8_weight(name, tensors[self.suffix], tensors[self.beside[0]], *size)
