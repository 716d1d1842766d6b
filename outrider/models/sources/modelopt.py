"""Files with `quant_method: modelopt`: fp8 with one scale for a matrix or for each output, or NVFP4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from outrider.models.config_reader import ConfigReader
from outrider.models.sources.quantization import KEY, ModuleNames, Quantization

if TYPE_CHECKING:
    import torch

    from outrider.formats import StoredFormat, StoredWeight

GROUP = 16  # inputs that share a scale in NVFP4


class ModelOptFiles(Quantization):
    beside = (".weight_scale", ".weight_scale_2", ".input_scale")

    def __init__(self, settings: Mapping[str, Any]) -> None:
        reader = ConfigReader(settings, KEY)
        if reader.has("quantization"):  # as hf_quant_config.json has it
            reader.passes_over("quant_method", "producer")
            reader.refuse_unread()
            reader = reader.section("quantization")
        # The groups repeat what quant_algo says; caches have a setting of their own.
        reader.passes_over("quant_method", "producer", "config_groups", "kv_cache_scheme", "kv_cache_quant_algo")
        self._is_nvfp4 = reader.must_equal("quant_algo", "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4") == "NVFP4"
        if self._is_nvfp4:
            reader.must_equal("group_size", GROUP, default=GROUP)
        self._plain = ModuleNames(reader, "ignore", "exclude_modules")
        reader.refuse_unread()

    def stored_format(self, name: str) -> StoredFormat | None:
        import torch

        from outrider.formats.scaled import ScaledFormat

        if name in self._plain:
            return None
        if self._is_nvfp4:
            return ScaledFormat("fp4", GROUP, torch.float8_e4m3fn, has_factors=True)
        return ScaledFormat("fp8", rounds=True)

    def join(self, name: str, tensors: Mapping[str, torch.Tensor]) -> StoredWeight:
        from outrider.models.sources.scaled_weights import fp4_weight, fp8_weight

        codes, scales = tensors[".weight"], tensors[".weight_scale"]
        if self._is_nvfp4:
            return fp4_weight(name, codes, scales, GROUP, tensors[".weight_scale_2"])
        return fp8_weight(name, codes, scales)
