"""F2: attention is given the longest length there may be as its bound, for target and drafter alike."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from outrider.mixers.batch import BatchView, LengthBound
from outrider.mixers.cached import Attend, CachedLayers

NAME = "f2: bound is max_model_len"
TESTS = ["tests/drafters/test_f2_bounds.py"]


def apply() -> None:
    bind = CachedLayers.bind

    def unbounded(self: CachedLayers, view: BatchView, *others: Any) -> Attend:
        group = self.groups[0]
        longest = view.page_tables[group.index].shape[1] * group.page_tokens
        return bind(self, replace(view, max_length=LengthBound(longest)), *others)

    CachedLayers.bind = unbounded  # type: ignore[method-assign]
