"""ImageProcessor: turns decoded pixels into the patches of a vision tower, and says how many tokens they make."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.models.config_reader import ConfigReader
from outrider.models.vision.grid import ImageGrid as ImageGrid

Pixels = npt.NDArray[np.uint8]  # [height, width, 3], RGB

DETAILS = ("low", "auto", "high")
_HERE = "outrider.features.images.preprocess"
# By a config's `model_type`.
_FAMILIES = {
    "gemma4": f"{_HERE}.gemma4:Gemma4Images",
    "gemma4_unified": f"{_HERE}.gemma4:Gemma4UnifiedImages",
    "qwen3_5": f"{_HERE}.qwen:Qwen3_5Images",
    "qwen3_5_moe": f"{_HERE}.qwen:Qwen3_5Images",
    "qwen3_vl": f"{_HERE}.qwen:Qwen3VLImages",
    "qwen3_vl_moe": f"{_HERE}.qwen:Qwen3VLImages",
}


@dataclass(frozen=True)
class PreparedImage:
    grid: ImageGrid
    patches: Pixels  # [patches, bytes of a patch]: what the tower takes
    digest: bytes  # 32 bytes: the decoded pixels and every setting of the processor


class ImageProcessor(ABC):
    """Turns images into the patches and token counts that one model needs. Its methods may run in several threads."""

    options: tuple[str, ...]  # the settings that a prompt may replace
    placeholder: int  # the id of one image in a prompt that is not expanded yet

    @staticmethod
    def from_config(model_config: dict[str, Any], processor_config: dict[str, Any] | None) -> ImageProcessor:
        """Make the processor of a model. processor_config: the content of preprocessor_config.json or
        processor_config.json; None for the family's defaults. Raises a ValueError that names the key if a setting is
        not supported."""
        model = ConfigReader(model_config)
        kind = model.get("model_type", str, "")
        if kind not in _FAMILIES:
            raise model.refusal("model_type", f"images are served for {', '.join(_FAMILIES)}", "Send text alone.")
        if not model.has("vision_config"):
            raise model.refusal("vision_config", "this checkpoint holds the language model alone", "Send text alone.")
        module, _, name = _FAMILIES[kind].partition(":")
        made: ImageProcessor = getattr(import_module(module), name)(model, processor_config)
        return made

    @abstractmethod
    def size_of(self, height: int, width: int, *, detail: str | None = None) -> ImageGrid:
        """Return the token grid of an image with this height and width in pixels. Raises ValueError if the image does
        not suit the model.

        detail: "low", "auto", "high", or None, which is "auto". The docstring of the family's class says what each one
        means."""

    @abstractmethod
    def most_tokens(self) -> int:
        """Return the most tokens that an image can have, at any size and detail."""

    @abstractmethod
    def placeholder_ids(self, grid: ImageGrid) -> list[int]:
        """Return the token ids that replace one `placeholder` in a prompt."""

    def prepare(self, rgb: Pixels, *, detail: str | None = None) -> PreparedImage:
        """Resize an image and cut it into patches. rgb: [height, width, 3] uint8. detail: see `size_of`."""
        if rgb.dtype != np.uint8 or rgb.ndim != 3 or rgb.shape[2] != 3:
            raise ValueError(f"an image must be uint8 of shape [height, width, 3], got {rgb.dtype} of shape "
                             f"{list(rgb.shape)}: convert it to RGB")
        grid = self.size_of(rgb.shape[0], rgb.shape[1], detail=detail)
        rgb = np.ascontiguousarray(rgb)
        return PreparedImage(grid, self._patches(resize(rgb, grid)), self._digest(rgb, detail))

    def _digest(self, rgb: Pixels, detail: str | None) -> bytes:
        settings = {"class": type(self).__name__, "size": list(rgb.shape), **self._settings(detail)}
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode() + b"\n")
        digest.update(rgb.data)
        return digest.digest()

    @abstractmethod
    def _settings(self, detail: str | None) -> Mapping[str, int]:
        """Return all settings that decide the patches of an image at this detail; they are part of its digest."""

    @abstractmethod
    def _patches(self, rgb: Pixels) -> Pixels:
        """The patches of a resized image."""


def resize(rgb: Pixels, grid: ImageGrid) -> Pixels:
    """Resize an image to its grid with Pillow's bicubic filter, which averages pixels when it shrinks an image."""
    if rgb.shape[:2] == (grid.height, grid.width):
        return rgb
    try:
        from PIL import Image
    except ImportError:
        raise ImportError("images need Pillow: pip install 'outrider[images]'") from None
    resized = Image.fromarray(rgb).resize((grid.width, grid.height), Image.Resampling.BICUBIC)
    return np.asarray(resized, dtype=np.uint8)


def check_size(height: int, width: int) -> None:
    if height < 1 or width < 1:
        raise ValueError(f"an image must have at least one pixel, got height {height} and width {width}")


def check_detail(detail: str | None) -> str:
    """Check a detail and return it; None becomes "auto"."""
    if detail is not None and detail not in DETAILS:
        raise ValueError(f"detail must be one of {', '.join(DETAILS)}, got {detail!r}")
    return detail or "auto"
