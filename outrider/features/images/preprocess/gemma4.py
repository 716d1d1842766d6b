"""Images of Gemma 4: resized to fill a budget of tokens, each of which stands for 48 x 48 pixels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from outrider.features.images.preprocess.processor import ImageProcessor, Pixels, check_detail, check_size
from outrider.features.images.preprocess.settings import check_normalization, check_steps, image_settings, must_match
from outrider.models.config_reader import ConfigReader
from outrider.models.vision.grid import ImageGrid

BUDGETS = (70, 140, 280, 560, 1120)  # tokens of an image
LOW, USUAL, HIGH = 70, 280, 1120


class Gemma4Images(ImageProcessor):
    """Preprocessing for Gemma 4 models with a vision tower. A patch has 16 x 16 pixels, and a token stands for 3 x 3
    patches.

    An image gets at most 70 tokens with detail "low" and 1,120 with "high". With "auto" the limit is `max_soft_tokens`
    of the processor config, 280 by default. Small images are enlarged until they fill the budget."""

    options = ("max_soft_tokens",)

    def __init__(self, model: ConfigReader, processor_config: Mapping[str, Any] | None) -> None:
        vision, settings = model.section("vision_config"), image_settings(processor_config)
        self._patch = vision.get("patch_size", int, 16, least=1)
        self._pool = vision.get("pooling_kernel_size", int, 3, least=1)
        check_steps(settings)
        if settings.get("do_normalize", bool, False):
            check_normalization(settings, 0, 1)
        must_match(settings, "patch_size", self._patch, "patch_size")
        must_match(settings, "pooling_kernel_size", self._pool, "pooling_kernel_size")
        self._usual: int = settings.must_equal("max_soft_tokens", *BUDGETS, default=USUAL)
        self._most_side = self._positions(vision)
        self.placeholder = model.get("image_token_id", int, 258880)
        self._begin = model.get("boi_token_id", int, 255999)
        self._end = model.get("eoi_token_id", int, 258882)

    def _positions(self, vision: ConfigReader) -> int:
        """Return the most tokens in a row or a column for which the model has position embeddings."""
        return vision.get("position_embedding_size", int, 10240, least=1) // self._pool

    def size_of(self, height: int, width: int, *, detail: str | None = None) -> ImageGrid:
        check_size(height, width)
        side = self._patch * self._pool
        resized = fill_budget(height, width, self._budget(detail), side, self._patch)
        grid = ImageGrid.from_pixels(*resized, side)
        if max(grid.rows, grid.cols) > self._most_side:
            raise ValueError(f"an image of {width} x {height} pixels makes {grid.cols} x {grid.rows} tokens, and the "
                             f"model has positions for {self._most_side}: crop it")
        return grid

    def most_tokens(self) -> int:
        return HIGH

    def placeholder_ids(self, grid: ImageGrid) -> list[int]:
        return [self._begin, *[self.placeholder] * grid.num_tokens, self._end]

    def _budget(self, detail: str | None) -> int:
        return {"low": LOW, "auto": self._usual, "high": HIGH}[check_detail(detail)]

    def _settings(self, detail: str | None) -> Mapping[str, int]:
        return {"patch": self._patch, "pool": self._pool, "budget": self._budget(detail)}

    def _patches(self, rgb: Pixels) -> Pixels:
        return cut_squares(rgb, self._patch)


class Gemma4UnifiedImages(Gemma4Images):
    """Preprocessing for Gemma 4 models without a tower: every token is a tile of 48 x 48 pixels. Details as in
    `Gemma4Images`."""

    def _positions(self, vision: ConfigReader) -> int:
        return vision.get("mm_posemb_size", int, 1120, least=1)

    def _patches(self, rgb: Pixels) -> Pixels:
        return cut_squares(rgb, self._patch * self._pool)


def fill_budget(height: int, width: int, budget: int, side: int, patch: int) -> tuple[int, int]:
    """The height and width of an image that fills a budget of tokens, each `side` x `side` pixels, with the image's
    aspect ratio, rounded down to whole tokens. The order of operations is transformers', for equal rounding."""
    target = budget * (side // patch) ** 2 * patch**2
    factor = math.sqrt(target / (height * width))
    rows, cols = math.floor(factor * height / side), math.floor(factor * width / side)
    if rows == 0 and cols == 0:
        raise ValueError(f"an image of {width} x {height} pixels makes no token of {side} x {side} pixels within a "
                         f"budget of {budget}")
    if rows == 0:
        rows, cols = 1, min(width // height, budget)
    elif cols == 0:
        rows, cols = min(height // width, budget), 1
    return rows * side, cols * side


def cut_squares(rgb: Pixels, side: int) -> Pixels:
    """The squares of an image, row by row: [squares, side * side * 3], each in the order (row, column, colour)."""
    rows, cols = rgb.shape[0] // side, rgb.shape[1] // side
    squares = rgb.reshape(rows, side, cols, side, 3).transpose(0, 2, 1, 3, 4)
    return squares.reshape(rows * cols, side * side * 3)
