"""Images of Qwen3-VL and Qwen3.5: resized within limits of their area, in whole tokens of 32 x 32 pixels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from outrider.features.images.preprocess.processor import ImageProcessor, Pixels, check_detail, check_size
from outrider.features.images.preprocess.settings import check_normalization, check_steps, image_settings, must_match
from outrider.models.config_reader import ConfigReader
from outrider.models.vision.grid import ImageGrid

LEAST_PIXELS, MOST_PIXELS = 65_536, 16_777_216  # the defaults of the processor configs
LOW_TOKENS, HIGH_TOKENS = 256, 1024
LARGEST_RATIO = 200  # of the longer side to the shorter one


class Qwen3VLImages(ImageProcessor):
    """Preprocessing for Qwen3-VL. A patch has 16 x 16 pixels, and a token stands for 2 x 2 patches.

    With detail "auto" an image keeps its size if its area lies within the limits of the processor config, by default
    65,536 to 16,777,216 pixels (64 to 16,384 tokens). "low" lowers the upper limit to 256 tokens. "high" raises the
    lower limit to 1,024 tokens, which the model needs to locate objects: smaller images are enlarged."""

    default_placeholder = 151655
    options = ("min_pixels", "max_pixels", "size")

    def __init__(self, model: ConfigReader, processor_config: Mapping[str, Any] | None) -> None:
        vision, settings = model.section("vision_config"), image_settings(processor_config)
        self._patch = vision.get("patch_size", int, 16, least=1)
        self._merge = vision.get("spatial_merge_size", int, 2, least=1)
        check_steps(settings)
        settings.must_equal("do_normalize", True, default=True)
        check_normalization(settings, 0.5, 0.5)
        must_match(settings, "patch_size", self._patch, "patch_size")
        must_match(settings, "merge_size", self._merge, "spatial_merge_size")
        frames = vision.get("temporal_patch_size", int, 2, least=1)
        must_match(settings, "temporal_patch_size", frames, "temporal_patch_size")
        self._least, self._most = read_areas(settings)
        self.placeholder = model.get("image_token_id", int, self.default_placeholder)

    def size_of(self, height: int, width: int, *, detail: str | None = None) -> ImageGrid:
        check_size(height, width)
        side = self._patch * self._merge
        return ImageGrid.from_pixels(*fit_area(height, width, side, *self._areas(detail)), side)

    def most_tokens(self) -> int:
        token = (self._patch * self._merge) ** 2
        areas = [self._areas(detail) for detail in ("low", "auto", "high")]
        most, least = max(most for _, most in areas) / token, max(least for least, _ in areas) / token
        longest = math.sqrt(LARGEST_RATIO)
        enlarged = least + math.sqrt(least) * (longest + 1 / longest) + 1  # both sides are rounded up
        single_row = min(math.sqrt(most) * longest, LARGEST_RATIO)  # at least one token high, however small the limit
        return math.floor(max(most, enlarged, single_row))

    def placeholder_ids(self, grid: ImageGrid) -> list[int]:
        """Return the pad tokens of one image. The chat template writes the tokens that begin and end an image."""
        return [self.placeholder] * grid.num_tokens

    def _areas(self, detail: str | None) -> tuple[int, int]:
        """The smallest and largest area in pixels."""
        token = (self._patch * self._merge) ** 2
        match check_detail(detail):
            case "low":
                most = min(self._most, LOW_TOKENS * token)
                return min(self._least, most), most
            case "high":
                return min(max(self._least, HIGH_TOKENS * token), self._most), self._most
            case _:
                return self._least, self._most

    def _settings(self, detail: str | None) -> Mapping[str, int]:
        least, most = self._areas(detail)
        return {"patch": self._patch, "merge": self._merge, "least": least, "most": most}

    def _patches(self, rgb: Pixels) -> Pixels:
        """Return the smallest and the largest allowed area of an image in pixels."""
        patch, merge = self._patch, self._merge
        rows, cols = rgb.shape[0] // (patch * merge), rgb.shape[1] // (patch * merge)
        split = rgb.reshape(rows, merge, patch, cols, merge, patch, 3)
        return split.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * cols * merge**2, 3 * patch**2)


class Qwen3_5Images(Qwen3VLImages):
    """Preprocessing for Qwen3.5, dense and with experts, and later models of that type."""

    default_placeholder = 248056


def read_areas(settings: ConfigReader) -> tuple[int, int]:
    """Read the smallest and largest area of an image in pixels: from the older keys if present, otherwise from
    `size`."""
    size = settings.section_or_empty("size")
    unknown = sorted(size.values.keys() - {"shortest_edge", "longest_edge"})
    if unknown:
        raise size.refusal(unknown[0], "size may only have the keys shortest_edge and longest_edge (areas in pixels)")
    least = settings.get("min_pixels", int, size.get("shortest_edge", int, LEAST_PIXELS, least=1), least=1)
    most = settings.get("max_pixels", int, size.get("longest_edge", int, MOST_PIXELS, least=1), least=1)
    if least > most:
        key = "min_pixels" if settings.has("min_pixels") else "size"
        raise settings.refusal(key, f"the smallest area ({least}) must not exceed the largest ({most})")
    return least, most


def fit_area(height: int, width: int, side: int, least: int, most: int) -> tuple[int, int]:
    """The height and width in whole tokens of `side` x `side` pixels, with an area from `least` to `most` and about the
    image's aspect ratio. Rounds as transformers does: half to even, then down if too large, or up if too small."""
    ratio = max(height, width) / min(height, width)
    if ratio > LARGEST_RATIO:
        raise ValueError(f"an image of {width} x {height} pixels is {ratio:.0f} times as long as wide, and the model "
                         f"takes at most {LARGEST_RATIO} times: crop it")
    new_height, new_width = round(height / side) * side, round(width / side) * side
    if new_height * new_width > most:
        scale = math.sqrt(height * width / most)
        new_height, new_width = (max(side, math.floor(n / scale / side) * side) for n in (height, width))
    elif new_height * new_width < least:
        scale = math.sqrt(least / (height * width))
        new_height, new_width = (math.ceil(n * scale / side) * side for n in (height, width))
    return new_height, new_width
