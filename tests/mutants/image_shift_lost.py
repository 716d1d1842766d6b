"""Generated tokens rotate by their places in the request, as if images before them were text."""

from __future__ import annotations

from outrider.features.images.part import GridImages

NAME = "image shift lost"
TESTS = ["tests/images/test_oracle.py", "-k", "one and qwen3_vl"]


def apply() -> None:
    GridImages.rope_shift = property(lambda self: 0)  # type: ignore[assignment,method-assign]
