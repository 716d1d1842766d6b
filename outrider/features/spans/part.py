"""PromptSpans: the spans of a prompt whose tokens attend to each other in both directions. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from outrider.core.input_part import InputPart


@dataclass(frozen=True, slots=True)
class PromptSpans(InputPart):
    """Disjoint spans [start, end) of positions, in order. Keys and values of a span's tokens depend on the whole span.
    So a span is computed in one step, and pages share a span only as a whole."""

    spans: tuple[tuple[int, int], ...]

    def page_content(self, start: int, end: int, token_ids: Sequence[int]) -> list[int]:
        """Return the part of a page's prefix-cache key that spans add: the spans that touch the page, with all their
        tokens, also those in later pages."""
        touching = ((first, last) for first, last in self.spans if first < end and start < last)
        return [number for first, last in touching for number in (first, last, *token_ids[first:last])]

    def last_cut(self, position: int) -> int:
        return next((start for start, end in self.spans if start < position < end), position)

    def next_cut(self, position: int) -> int:
        return next((end for start, end in self.spans if start < position < end), position)

    def two_way_ranges(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        return (span for span in self.spans if start <= span[0] and span[1] <= end)
