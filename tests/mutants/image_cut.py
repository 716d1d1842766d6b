"""A chunk or a hit ends inside an image whose tokens see each other in both directions."""

from __future__ import annotations

from outrider.features.images.part import TwoWayImages

NAME = "image cut"
TESTS = ["tests/images/test_matrix.py", "-k", "both_ways"]


def apply() -> None:
    for name in ("last_cut", "next_cut"):
        setattr(TwoWayImages, name, lambda self, position: position)
