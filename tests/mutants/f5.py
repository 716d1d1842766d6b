"""F5: the index buffer has a row for every 128 positions of the longest context, where query tiles were meant."""

from __future__ import annotations

from outrider.cache.groups import Group
from outrider.core import Limits
from outrider.mixers.paged.flex_backend import PROMPT_TILE, FlexExtents

NAME = "f5: index buffer sized by the longest context"
TESTS = [
    "tests/engine/test_f5.py::test_f5_captured_batches_have_the_same_mask",
    "tests/engine/test_f5.py::test_f5_buffers_hold_every_step_and_stay_small",
]


def apply() -> None:
    def from_context(cls: type[FlexExtents], group: Group, limits: Limits) -> FlexExtents:
        return cls(-(-limits.max_len // PROMPT_TILE), group.kind.capacity(limits).table_width + 1)

    FlexExtents.from_limits = classmethod(from_context)  # type: ignore[method-assign, assignment]
