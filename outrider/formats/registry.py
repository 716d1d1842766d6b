"""The table of formats by the kind of stored weight that they keep. `register_format` adds a format from outside the
package.

A layer gets the format that is registered for the kind of all its matrices, if the format serves the layer's
declaration. Otherwise the layer is dense, and its stored weights are dequantised while they are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from outrider.core.lazy_exports import LateModule, import_attribute
from outrider.formats.declared import (
    ExpertsDeclaration,
    InputShard,
    Ranks,
    StoredFormat,
    UnsummedShard,
    VocabularyShard,
)
from outrider.formats.weight_format import EXPANSION, EXPERTS, LINEAR, WeightFormat
from outrider.kernels.code_kinds import CODES
from outrider.kernels.gguf_kinds import KINDS

if TYPE_CHECKING:
    from outrider.formats import gguf_codes, scaled, summed
else:
    gguf_codes = LateModule("outrider.formats.gguf_codes")
    scaled = LateModule("outrider.formats.scaled")
    summed = LateModule("outrider.formats.summed")

MOST_RANKS = 64  # that a refusal names
Format = TypeVar("Format", bound=WeightFormat[Any])
SCALED_LINEAR, STACKED_LINEAR = "outrider.formats.scaled:ScaledLinear", "outrider.formats.stacked:StackedLinear"
# For each way to use a weight, the formats by kind of stored weights; those of the package are imported when a source
# has the kind.
_FORMATS: dict[str, dict[str, type[WeightFormat[Any]] | str]] = {
    LINEAR: {**dict.fromkeys(KINDS, "outrider.formats.gguf:GgufLinear"), **dict.fromkeys(CODES, SCALED_LINEAR)},
    EXPERTS: {**dict.fromkeys(KINDS, "outrider.formats.gguf_experts:GgufExperts"),
              **dict.fromkeys(CODES, "outrider.formats.scaled:ScaledExperts")},
    EXPANSION: {},
}
_BASES = {LINEAR: "LinearFormat", EXPERTS: "ExpertsFormat", EXPANSION: "ExpansionFormat"}  # for each way to use one


def register_format(kind: str, format_class: type[WeightFormat[Any]]) -> None:
    """Register a format for stored weights of a kind. The format's base class determines for which modules it is used:
    linear layers and embeddings, experts, or latent expansions."""
    use = getattr(format_class, "use", None)
    if use not in _FORMATS:
        raise TypeError(f"{format_class.__name__} is not a weight format, because it is derived from none of the "
                        f"bases: derive it from one of {', '.join(_BASES.values())}")
    _FORMATS[use][kind] = format_class


def as_codes(stored: StoredFormat, device: torch.device) -> StoredFormat:
    """Return how a model on this device stores a weight in memory. A GPU stores GGUF kinds as codes with scales."""
    return gguf_codes.as_codes(stored, device) if device.type == "cuda" else stored


@dataclass(frozen=True)
class FormatChoice:
    """Chooses the format of each layer of a model from how the source stores its matrices."""

    stored_format: Callable[[str], StoredFormat | None]  # by a matrix's name, without ".weight"; None for numbers
    device: torch.device  # the device on which the model runs; that of a declaration may be meta
    quantization: str | None = None  # codes into which layers of numbers are brought at load

    def kept(self, base: type[Format], declared: Any, names: Iterable[str]) -> Callable[[Any], Format] | None:
        """Return a function that builds the format in which all these matrices stay quantised. `base`: the base class
        that the format must have. None if the layer must be dense."""
        table = _FORMATS[base.use]
        stored: list[StoredFormat] = []
        made, name = self._made(base, declared), ""
        for name in names:
            found = self.stored_format(name) or made
            if found is None or found.kind not in table:
                return None  # at the first of experts' matrices, which may be many
            stored.append(as_codes(found, self.device))
        entry, *others = {table[held.kind] for held in stored}
        if entry == SCALED_LINEAR and len(set(stored)) > 1:
            entry = STACKED_LINEAR
        chosen: type[Any] = import_attribute(entry) if isinstance(entry, str) else entry
        if others or not issubclass(chosen, base):
            return None
        if not chosen.serves(declared, stored, self.device):
            refuse_shard(name, chosen, declared, stored, self.device)
            return None
        return partial(chosen, stored=stored)

    def _made(self, base: type[Any], declared: Any) -> StoredFormat | None:
        """Return the format to which the setting `quantization` converts an unquantised layer while it is read. None if
        the layer is not converted."""
        if self.quantization is None or not base.may_be_coded:
            return None
        return scaled.choose_made(self.quantization, *(declared.projections if base.use == EXPERTS else (declared,)))


def refuse_shard(name: str, kept_by: type[WeightFormat[Any]], declared: Any, stored: list[StoredFormat],
                 device: torch.device) -> None:
    """Raise ValueError if a format serves a weight on one rank but cannot be sharded for this number of ranks. The
    weight is not dequantised instead, because it would take several times the memory."""
    shard = declared.shard
    if shard is None or not kept_by.serves(replace(declared, shard=None), stored, device):
        return

    def serves(count: int) -> bool:
        try:
            return kept_by.serves(replace(declared, shard=replace(shard, ranks=Ranks(0, count))), stored, device)
        except ValueError:  # its features do not divide
            return False

    counts = ", ".join(str(count) for count in range(1, MOST_RANKS + 1) if serves(count))
    raise ValueError(f"{name}: its quantisation groups ({stored[0].kind}) cannot be split evenly over "
                     f"{shard.ranks.count} ranks: use a tensor_parallel_size of {counts}, or set keep_quantized=False")


def build_format(declared: Any, make: Callable[[Any], Any]) -> Any:
    """Build the format of a declaration and allocate it. A format with sharded inputs is wrapped in one that sums over
    ranks. A format with a sharded vocabulary is wrapped in one that sums embeddings and gathers logits."""
    shard = declared.shard
    if isinstance(shard, VocabularyShard):
        return summed.SharedVocabulary(declared, shard, make(declared))
    is_experts = isinstance(declared, ExpertsDeclaration)
    is_unsummed = isinstance(shard, UnsummedShard) and (is_experts or not declared.has_bias)
    if not isinstance(shard, InputShard) or is_unsummed:
        return make(declared)
    if is_experts:
        return summed.SummedExperts(shard, make(declared))
    return summed.SummedLinear(declared, shard, make(declared.without_bias()))
