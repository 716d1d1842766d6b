"""Spans of a prompt whose tokens see each other in both directions, and what that means for chunks and prefix hits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from outrider.core.feature_parts import BatchPart


class MarkedSpan(NamedTuple):
    """A span that a step computes whole."""

    request: int  # index in the batch
    start: int
    end: int  # one past its last position


@dataclass(frozen=True, slots=True)
class MarkedSpans(BatchPart):
    """The spans that a step computes."""

    spans: list[MarkedSpan]


@dataclass(frozen=True, slots=True)
class PromptSpans:
    """Disjoint spans [start, end) of positions, in order. Keys and values of a span's tokens depend on the whole span,
    so a span is computed in one step and never shared in part."""

    spans: tuple[tuple[int, int], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.spans)

    @property
    def longest(self) -> int:
        return max((end - start for start, end in self.spans), default=0)

    def floor(self, position: int) -> int:
        """The last position up to this one at which a chunk or a prefix hit may end."""
        for start, end in self.spans:
            if start < position < end:
                return start
        return position

    def chunk(self, start: int, length: int, most: int) -> int:
        """The number of tokens of the chunk from `start` on that is nearest to `length` and cuts no span; 0 if a span
        begins at `start` and has more than `most` tokens."""
        end = start + length
        for first, last in self.spans:
            if first < end < last:
                return last - start if last - start <= most else first - start
        return length

    def within(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """The spans that lie in these positions."""
        return (span for span in self.spans if start <= span[0] and span[1] <= end)

    def touching(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """The spans of which some token lies in these positions."""
        return (span for span in self.spans if span[0] < end and start < span[1])


NO_SPANS = PromptSpans()


def check_spans(given: object, prompt_len: int, most: int) -> PromptSpans:
    """Make the spans of a prompt. Raises ValueError if they are not valid."""
    name = "bidirectional_spans"
    if not isinstance(given, (list, tuple)):
        raise ValueError(f"{name} must be a list of [start, end] pairs, got {type(given).__name__}")
    spans = []
    for item in given:
        if not (isinstance(item, (list, tuple)) and len(item) == 2 and all(type(end) is int for end in item)):
            raise ValueError(f"{name} must be a list of [start, end] pairs of integers, got {item!r}")
        start, end = item
        if not 0 <= start < end <= prompt_len:
            raise ValueError(f"{name}: [{start}, {end}] is not a span of a prompt of {prompt_len} tokens, which has "
                             "0 <= start < end")
        if end - start > most:
            raise ValueError(f"{name}: [{start}, {end}] has {end - start} tokens, and a step takes spans of at most "
                             f"{max(0, most)}: raise max_num_batched_tokens or lower max_num_seqs")
        spans.append((start, end))
    spans.sort()
    for (_, end), (start, _) in zip(spans, spans[1:], strict=False):
        if start < end:
            raise ValueError(f"{name}: two spans overlap at position {start}")
    return PromptSpans(tuple(spans))
