"""Memory is sized for one state per request: what drafts keep is not counted."""

from __future__ import annotations

from dataclasses import replace

from outrider.cache.kinds import RecurrentKind, RowCapacity
from outrider.core import Limits

NAME = "f4: capacity without the window"
TESTS = ["tests/engine/test_f4_states.py::test_f4_buffers_are_what_capacity_says_for_every_k"]


def apply() -> None:
    capacity = RecurrentKind.capacity

    def without_window(self: RecurrentKind, limits: Limits) -> RowCapacity:
        return capacity(self, replace(limits, max_drafts=0))

    RecurrentKind.capacity = without_window  # type: ignore[method-assign]
