"""A page's key tells which image lies in it, and not where."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.features.images.part import ImageInputs

NAME = "image key without offset"
TESTS = ["tests/images/test_part.py"]


def apply() -> None:
    def page_content(self: ImageInputs, start: int, end: int, token_ids: Sequence[int]) -> list[int]:
        return [int.from_bytes(image.digest[:7], "big") for image in self.images if image.touches(start, end)]

    ImageInputs.page_content = page_content  # type: ignore[method-assign]
