"""A matrix that holds several segments is sharded as if it were one: the first rank gets all of the first segments."""

from __future__ import annotations

from dataclasses import replace

from outrider.formats.declared import ModelSize, OutputShard

NAME = "rank: a packed matrix sharded evenly"
TESTS = ["tests/ranks/test_families.py", "-k", "qwen3_5_bias-2"]


def apply() -> None:
    held = OutputShard.held

    def evenly(self: OutputShard, name: str, size: ModelSize) -> tuple[range, ...]:
        return held(replace(self, packed={}), name, size)

    OutputShard.held = evenly  # type: ignore[method-assign]
