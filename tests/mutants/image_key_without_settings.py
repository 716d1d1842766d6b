"""An image's digest is that of its pixels alone, whatever the processor makes of them."""

from __future__ import annotations

import hashlib
from typing import Any

from outrider.features.images.preprocess.processor import ImageProcessor

NAME = "image key without settings"
TESTS = ["tests/images/test_part.py"]


def apply() -> None:
    def digest(self: ImageProcessor, rgb: Any, detail: str | None) -> bytes:
        return hashlib.sha256(rgb).digest()

    ImageProcessor._digest = digest  # type: ignore[method-assign]
