"""ImageGrid: the size of an image after resizing, in pixels and in tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ImageGrid:
    num_tokens: int  # rows * cols
    rows: int  # of tokens
    cols: int
    height: int  # in pixels, after resizing
    width: int

    @classmethod
    def from_pixels(cls, height: int, width: int, side: int) -> ImageGrid:
        """Return the grid of an image of this size after resizing, if a token stands for `side` x `side` pixels."""
        rows, cols = height // side, width // side
        return cls(rows * cols, rows, cols, height, width)
