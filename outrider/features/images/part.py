"""ImageInputs: the images of one prompt, and the positions of the tokens that stand for them. No torch."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.core.input_part import InputPart
from outrider.models.vision.grid import ImageGrid


@dataclass(frozen=True, slots=True, eq=False)
class PlacedImage:
    """One image of a prompt."""

    offset: int  # position of its first token
    grid: ImageGrid
    digest: bytes  # 32 bytes: of its pixels and of every setting of the processor
    patches: NDArray[np.uint8]  # what the tower takes

    @property
    def end(self) -> int:
        return self.offset + self.grid.num_tokens

    def touches(self, start: int, end: int) -> bool:
        """Whether any token of the image has a position in [start, end)."""
        return self.offset < end and start < self.end


@dataclass(frozen=True, slots=True, eq=False)
class ImageInputs(InputPart):
    """The images of a prompt, in prompt order. Features of the vision tower replace the embeddings of their tokens. In
    all else these tokens are like others: causal, with one position each. Steps and prefix hits may end inside an
    image, because its features depend on the image alone."""

    images: tuple[PlacedImage, ...]

    def page_content(self, start: int, end: int, token_ids: Sequence[int]) -> list[int]:
        """Return the part of a page's cache key that images add: for each image with tokens in the page, its digest and
        its position relative to the page's start. So the key does not depend on where the page lies in a prompt."""
        return [number for image in self.images if image.touches(start, end)
                for number in (image.offset - start, *struct.unpack("<4q", image.digest))]

    def resume_points(self) -> Iterator[int]:
        """The ends of images: other prompts ask something else about the same ones."""
        return (image.end for image in self.images)

    def encoded_ranges(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        return ((max(start, image.offset), min(end, image.end)) for image in self.images if image.touches(start, end))


@dataclass(frozen=True, slots=True, eq=False)
class TwoWayImages(ImageInputs):
    """Images whose tokens attend to each other in both directions. Keys and values of an image's tokens depend on the
    whole image. So one step computes the whole image, and no prefix hit ends inside it."""

    def last_cut(self, position: int) -> int:
        return next((image.offset for image in self.images if image.offset < position < image.end), position)

    def next_cut(self, position: int) -> int:
        return next((image.end for image in self.images if image.offset < position < image.end), position)

    def two_way_ranges(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        return ((image.offset, image.end) for image in self.images if start <= image.offset and image.end <= end)


@dataclass(frozen=True, slots=True, eq=False)
class GridImages(ImageInputs):
    """Images whose tokens have positions of three components: time, row and column. An image has more tokens than
    positions, because it takes only as many positions as its longer side has tokens. So the text after it has smaller
    positions than token indexes."""

    def rope_positions(self, start: int, end: int) -> NDArray[np.int64] | None:
        if start >= self.images[-1].end:
            return None
        found = np.arange(start, end, dtype=np.int64)[None].repeat(3, axis=0)
        shift = 0
        for image in self.images:
            first, last = max(start, image.offset), min(end, image.end)
            if first < last:
                inside = _inside(image.grid, first - image.offset, last - image.offset)
                found[:, first - start : last - start] = image.offset + shift + inside
            shift += shift_behind(image.grid)
            found[:, max(0, image.end - start) :] += shift_behind(image.grid)
        return found

    @property
    def rope_shift(self) -> int:
        return sum(shift_behind(image.grid) for image in self.images)


def shift_behind(grid: ImageGrid) -> int:
    """Return the offset (at most 0) that an image adds to the positions of all tokens after it."""
    return max(grid.rows, grid.cols) - grid.num_tokens


def _inside(grid: ImageGrid, first: int, last: int) -> NDArray[np.int64]:
    """Return the positions [3, tokens] of an image's tokens from `first` to `last`, relative to its first token."""
    index = np.arange(first, last, dtype=np.int64)
    return np.stack([np.zeros_like(index), index // grid.cols, index % grid.cols])
