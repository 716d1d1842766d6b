"""A text is read from its segment, whatever text the segment holds by now."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.features.learning.traffic import ClosedText, ServedText, TrafficRing

NAME = "ring reads any text"
TESTS = ["tests/learning/test_traffic.py", "-k", "never_read"]


def apply() -> None:
    read = TrafficRing.read

    def read_any(self: TrafficRing, wanted: Sequence[ClosedText]) -> list[ServedText]:
        return read(self, [ClosedText(text.segment, text.segment.number) for text in wanted])

    TrafficRing.read = read_any  # type: ignore[method-assign]
