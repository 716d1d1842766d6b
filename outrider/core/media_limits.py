"""The setting `limit_mm_per_prompt`: how many images a prompt may have. Imported if it is given. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.core.fields import shown

MOST_IMAGES = 64  # of one prompt, unless the setting says otherwise


def check_limits(limits: Mapping[str, Any]) -> None:
    """Raise ValueError if the setting asks for anything but a number of images."""
    if image_size(limits) == (0, 0):
        raise ValueError("limit_mm_per_prompt: an image's width and height must be two numbers of pixels, both at "
                         f"least 1, got {shown(dict(limits))}")
    for kind in limits:
        count = count_of(limits, kind)
        if type(count) is not int or count < 0 or (count and kind != "image"):
            raise ValueError("limit_mm_per_prompt must be an object such as {'image': 2}, with a number of images "
                             f"from 0 and no other media, got {shown(dict(limits))}")


def most_images(limits: Mapping[str, Any]) -> int:
    """Return the most images that a prompt may have."""
    return int(count_of(limits, "image"))


def image_size(limits: Mapping[str, Any]) -> tuple[int, int] | None:
    """The width and height of the largest image; None if the setting does not say. (0, 0) if they are no sizes."""
    given = limits.get("image")
    if not isinstance(given, Mapping) or not {"width", "height"} & given.keys():
        return None
    width, height = given.get("width"), given.get("height")
    return (width, height) if type(width) is type(height) is int and min(width, height) > 0 else (0, 0)


def count_of(limits: Mapping[str, Any], kind: str) -> Any:
    """The number of a medium, which may stand alone or in a dict with sizes, as vLLM takes it."""
    default = MOST_IMAGES if kind == "image" else 0
    given = limits.get(kind, default)
    return given.get("count", default) if isinstance(given, Mapping) else given
