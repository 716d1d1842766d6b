"""The setting `limit_mm_per_prompt`: how many images a prompt may have. Imported if it is given. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.core.fields import shown

MOST_IMAGES = 64  # of one prompt, unless the setting says otherwise


def check_limits(limits: Mapping[str, Any]) -> None:
    """Raise ValueError if the setting limits anything but the number of images."""
    for kind in limits:
        count = count_of(limits, kind)
        if type(count) is not int or count < 0 or (count and kind != "image"):
            raise ValueError("limit_mm_per_prompt must be an object such as {'image': 2}, with a number of images "
                             f"from 0 and no other media, got {shown(dict(limits))}")


def most_images(limits: Mapping[str, Any]) -> int:
    """Return the most images that a prompt may have."""
    return int(count_of(limits, "image"))


def count_of(limits: Mapping[str, Any], kind: str) -> Any:
    """Return the number of inputs of a kind that the setting allows. As in vLLM, its value is a number, or a dict with
    the number and sizes."""
    default = MOST_IMAGES if kind == "image" else 0
    given = limits.get(kind, default)
    return given.get("count", default) if isinstance(given, Mapping) else given
