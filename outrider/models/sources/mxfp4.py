"""Files with `quant_method: mxfp4`: experts as joint tensors of 4-bit floats, with gate and up rows in turn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.models.config_reader import ConfigReader
from outrider.models.sources.quantization import KEY, ModuleNames, Quantization

if TYPE_CHECKING:
    import torch

    from outrider.formats import StoredFormat, StoredWeight

GROUP = 32  # inputs that share a scale


class Mxfp4Experts(Quantization):
    """The tensors [experts, outputs, groups, 16 bytes] and [experts, outputs, groups]."""

    suffix, beside, plain_suffix = "_blocks", ("_scales",), ""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        reader = ConfigReader(settings, KEY)
        reader.passes_over("quant_method")
        ModuleNames(reader, "modules_to_not_convert")
        reader.refuse_unread()

    def stored_format(self, name: str) -> StoredFormat:
        from outrider.formats import StoredFormat

        return StoredFormat("mxfp4_experts")

    def join(self, name: str, tensors: Mapping[str, torch.Tensor]) -> StoredWeight:
        from outrider.models.sources.scaled_weights import fp4_weight

        stored = fp4_weight(name, tensors["_blocks"].flatten(-2), tensors["_scales"], GROUP)
        return JointExperts(stored, is_interleaved=name.endswith("gate_up_proj"))


@dataclass(frozen=True)
class JointExperts:
    """The stored weight of all experts. No format keeps it."""

    stored: StoredWeight
    is_interleaved: bool
    kind: str = "mxfp4_experts"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    def parts(self) -> dict[str, torch.Tensor]:
        return {}

    def is_finite(self) -> bool:
        return self.stored.is_finite()

    def dequantize(self) -> torch.Tensor:
        """[experts, outputs, inputs], the rows of gate before those of up."""
        numbers = self.stored.dequantize()
        return numbers.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2) if self.is_interleaved else numbers
