"""InputEncoder: computes the vectors of a feature's input parts on the device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from outrider.core.input_part import InputPart
from outrider.layers.given_rows import PlacedVectors, placed


class InputEncoder(ABC):
    """Computes the vectors of one kind of input part. A worker calls it between two steps."""

    @abstractmethod
    def encode(self, part: InputPart, start: int, end: int) -> PlacedVectors:
        """Return the vectors of the part's encoded ranges within [start, end), on the device."""


Encoders = Mapping[type[InputPart], InputEncoder]


def vectors_of(part: InputPart, start: int, end: int, encoders: Encoders) -> list[PlacedVectors]:
    """Return the vectors of an input part at positions [start, end): those that it brings, and those that an encoder
    computes."""
    given = part.vectors(start, end)
    found = [] if given is None else [placed(given)]
    if any(part.encoded_ranges(start, end)):
        encoder = next(own for kind, own in encoders.items() if isinstance(part, kind))
        found.append(encoder.encode(part, start, end))
    return found
