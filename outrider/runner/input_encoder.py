"""InputEncoder: computes the vectors of a feature's input parts on the device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from outrider.core.input_part import InputPart
from outrider.layers.given_rows import PlacedVectors, placed

if TYPE_CHECKING:
    from outrider.formats import WeightSlot
    from outrider.models.loader import Stored


class InputEncoder(ABC):
    """Computes the vectors of one kind of input part. A worker calls it between two steps."""

    @abstractmethod
    def encode(self, part: InputPart, start: int, end: int) -> PlacedVectors:
        """Return the vectors of the part's encoded ranges within [start, end), on the device."""

    def expect(self, needed: Sequence[tuple[InputPart, int]]) -> None:
        """Prepare for a step that needs vectors; by default nothing is done. needed: each part that this step or a
        later one needs, with the first position that is needed of it."""

    # An encoder with weights of its own, which updates of the model's weights may replace

    def owns(self, name: str) -> bool:
        """Whether a tensor of the checkpoint is a weight of this encoder."""
        return False

    def weights(self) -> Mapping[str, WeightSlot]:
        return {}

    def arrivals(self, name: str, tensor: Stored) -> Iterable[tuple[str, Stored]]:
        """Return a tensor of the encoder in the form that its slots take."""
        return [(name, tensor)]

    def finalize(self) -> None:
        """Recompute tensors that are derived from weights, and forget encodings made with older weights."""

    def drop_updated(self) -> None:
        """Use the weights of the model's files again. Called when the model's weights were read again from its
        files."""


Encoders = Mapping[type[InputPart], InputEncoder]


def vectors_of(part: InputPart, start: int, end: int, encoders: Encoders) -> list[PlacedVectors]:
    """Return the vectors of an input part at positions [start, end): those that the part contains, and those that an
    encoder computes."""
    given = part.vectors(start, end)
    found = [] if given is None else [placed(given)]
    if any(part.encoded_ranges(start, end)):
        encoder = next(own for kind, own in encoders.items() if isinstance(part, kind))
        found.append(encoder.encode(part, start, end))
    return found
