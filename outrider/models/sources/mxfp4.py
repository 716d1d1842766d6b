"""Files with `quant_method: mxfp4`: experts as joint tensors of 4-bit floats, with alternating rows of gate and up."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from outrider.models.config_reader import ConfigReader
from outrider.models.sources.quantization import KEY, ModuleNames, Quantization, is_module

if TYPE_CHECKING:
    import torch

    from outrider.formats import StoredFormat, StoredWeight

GROUP = 32  # inputs that share a scale


class Mxfp4Experts(Quantization):
    """Experts in MXFP4: tensors of codes [experts, outputs, groups, 16 bytes] and of scales [experts, outputs, groups].
    All other tensors are not quantised."""

    suffix, beside, plain_suffix = "_blocks", ("_scales",), ""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        reader = ConfigReader(settings, KEY)
        reader.passes_over("quant_method")
        self._plain = ModuleNames(reader, "modules_to_not_convert")
        reader.refuse_unread()

    def stored_format(self, name: str) -> StoredFormat | None:
        import torch

        from outrider.formats.scaled import ScaledFormat

        is_stored = is_module("experts", name) and name not in self._plain
        return ScaledFormat("fp4", GROUP, torch.bfloat16) if is_stored else None

    def proof(self, name: str) -> str:
        """Return the name of the tensor that stores a matrix. A model may ask for the matrix of one expert
        ("experts.0.up_proj"); the files have one tensor for all experts."""
        experts, _, projection = name.rpartition(".")
        joint = "gate_up_proj" if projection in ("gate_proj", "up_proj") else projection
        return re.sub(r"\.\d+$", "", experts) + f".{joint}{self.beside[0]}"

    def join(self, name: str, tensors: Mapping[str, torch.Tensor]) -> StoredWeight:
        """Join the tensors to a weight [experts, outputs, inputs], with the rows of gate before those of up."""
        from outrider.models.sources.scaled_weights import fp4_weight

        blocks, scales = tensors["_blocks"].flatten(-2), tensors["_scales"]
        if name.endswith("gate_up_proj"):
            blocks, scales = (each.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2) for each in (blocks, scales))
        return fp4_weight(name, blocks, scales, GROUP)
