"""SeeingLimits: the facts about a vision model that the engine needs to prepare the images of prompts. No torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from outrider.core.feature_parts import LimitsPart
from outrider.features.images.part import GridImages, ImageInputs, TwoWayImages

FILES = ("preprocessor_config.json", "processor_config.json")
KINDS: dict[str, type[ImageInputs]] = {kind.__name__: kind for kind in (ImageInputs, TwoWayImages, GridImages)}


@dataclass(frozen=True)
class SeeingLimits(LimitsPart):
    takes_images = True

    kind: str  # the type of the parts that stand for images
    most: int  # images of one prompt
    longest: int  # the most tokens of an image, for which memory is planned
    own_placeholders: tuple[int, ...]  # of the model: tokens that stand for images, and for what is not served
    model_config: str = field(repr=False)  # JSON: the values of config.json, and those of the processor's file
    processor_config: str = field(repr=False)

    @property
    def placeholders(self) -> tuple[int, ...]:
        return self.own_placeholders

    @property
    def part_type(self) -> type[ImageInputs]:
        return KINDS[self.kind]


def read_processor_config(model_file: Path) -> dict[str, Any] | None:
    """The content of the file that says how a model's images are prepared; None if there is none. model_file: the file
    that describes the model. The vision part beside a GGUF file says it too."""
    for name in FILES:
        if (path := model_file.parent / name).is_file():
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return found
    if model_file.suffix != ".gguf":
        return None
    from outrider.models.sources.gguf_seeing import vision_parts
    from outrider.models.vision.mmproj import read_projector

    return next((read_projector(path).image_settings for path in vision_parts(model_file)), None)


@cache
def parsed(text: str) -> Any:
    return json.loads(text)
