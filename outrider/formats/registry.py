"""The table from kinds of stored weights to the formats that keep them. `register_format` adds one from outside.

A layer gets the format that is registered for the kind of all its matrices, if it serves the layer's declaration.
Otherwise the layer is dense, and its stored weights are dequantised while they are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch

from outrider.formats.declared import Ranks, StoredFormat
from outrider.formats.expansion import ExpansionFormat
from outrider.formats.experts import ExpertsFormat
from outrider.formats.gguf import GgufLinear
from outrider.formats.gguf_codes import as_codes
from outrider.formats.gguf_experts import GgufExperts
from outrider.formats.linear_format import LinearFormat
from outrider.formats.scaled import ScaledExperts, ScaledLinear, choose_made
from outrider.formats.stacked import StackedLinear
from outrider.formats.weight_format import WeightFormat
from outrider.kernels.gguf_kinds import KINDS
from outrider.kernels.scaled import CODES

MOST_RANKS = 64  # that a refusal names
Format = TypeVar("Format", bound=WeightFormat[Any])
# For each way to use a weight, the formats by kind of stored weights.
_FORMATS: dict[type[Any], dict[str, type[WeightFormat[Any]]]] = {
    LinearFormat: {**dict.fromkeys(KINDS, GgufLinear), **dict.fromkeys(CODES, ScaledLinear)},
    ExpertsFormat: {**dict.fromkeys(KINDS, GgufExperts), **dict.fromkeys(CODES, ScaledExperts)},
    ExpansionFormat: {},
}


def register_format(kind: str, format_class: type[WeightFormat[Any]]) -> None:
    """Keep stored weights of this kind in this format from now on. The base class decides where: in linear layers and
    embeddings, in experts, or in latent expansions."""
    bases = [base for base in _FORMATS if issubclass(format_class, base)]
    if not bases:
        names = ", ".join(base.__name__ for base in _FORMATS)
        raise TypeError(f"{format_class.__name__} is no weight format: derive it from one of {names}")
    _FORMATS[bases[0]][kind] = format_class


@dataclass(frozen=True)
class FormatChoice:
    """Chooses the format of each layer of a model from how the source stores its matrices."""

    stored_format: Callable[[str], StoredFormat | None]  # by a matrix's name, without ".weight"; None for numbers
    device: torch.device  # the device on which the model runs; that of a declaration may be meta
    quantization: str | None = None  # codes into which layers of numbers are brought at load

    def kept(self, base: type[Format], declared: Any, names: Iterable[str]) -> Callable[[Any], Format] | None:
        """Return a function that makes the format that keeps the bits of all these matrices. `base`: the base class
        that the format must have. None if the layer must be dense."""
        (table,) = (table for use, table in _FORMATS.items() if issubclass(base, use))
        stored: list[StoredFormat] = []
        made, name = self._made(base, declared), ""
        for name in names:
            found = self.stored_format(name) or made
            if found is None or found.kind not in table:
                return None  # at the first of experts' matrices, which may be many
            stored.append(as_codes(found, self.device))
        chosen, *others = {table[held.kind] for held in stored}
        if chosen is ScaledLinear and len(set(stored)) > 1:
            chosen = StackedLinear
        if others or not issubclass(chosen, base):
            return None
        if not chosen.serves(declared, stored, self.device):
            refuse_shard(name, chosen, declared, stored, self.device)
            return None
        return partial(chosen, stored=stored)

    def _made(self, base: type[Any], declared: Any) -> StoredFormat | None:
        """The format into which `quantization` codes a layer's numbers while they are read. None if they are not
        coded."""
        if self.quantization is None or base not in (LinearFormat, ExpertsFormat):
            return None
        return choose_made(self.quantization, *(declared.projections if base is ExpertsFormat else (declared,)))


def refuse_shard(name: str, kept_by: type[WeightFormat[Any]], declared: Any, stored: list[StoredFormat],
                 device: torch.device) -> None:
    """Raise ValueError if a format keeps a weight's bits on one rank but cannot be sharded for this number of ranks. As
    numbers, the weight would take several times the memory."""
    shard = declared.shard
    if shard is None or not kept_by.serves(replace(declared, shard=None), stored, device):
        return

    def serves(count: int) -> bool:
        try:
            return kept_by.serves(replace(declared, shard=replace(shard, ranks=Ranks(0, count))), stored, device)
        except ValueError:  # its features do not divide
            return False

    counts = ", ".join(str(count) for count in range(1, MOST_RANKS + 1) if serves(count))
    raise ValueError(f"{name}: it is stored as {stored[0].kind} in groups of inputs, which {shard.ranks.count} ranks "
                     f"cannot share as whole groups: numbers of ranks that can are {counts}; or set "
                     "keep_quantized=False")
