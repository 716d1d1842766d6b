"""A matrix that holds several segments is cut as if it were one: the first rank gets all of the first segments."""

from __future__ import annotations

from dataclasses import replace

from outrider.formats.declared import ModelSize, OutputCut

NAME = "rank: a packed matrix cut evenly"
TESTS = ["tests/ranks/test_families.py", "-k", "qwen3_5_bias-2"]


def apply() -> None:
    held = OutputCut.held

    def evenly(self: OutputCut, name: str, size: ModelSize) -> tuple[range, ...]:
        return held(replace(self, packed={}), name, size)

    OutputCut.held = evenly  # type: ignore[method-assign]
