"""F2: the attention layers of a recurrent hybrid are given the longest length there may be as their bound."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from outrider.mixers.batch import BatchView, LengthBound
from outrider.mixers.cached import Attend, CachedLayers

NAME = "f2: hybrids are bounded by max_model_len"
TESTS = [
    "tests/drafters/test_f2_bounds.py::test_f2_hybrids_latent_layers_and_the_assistant_are_bounded_by_the_batch[nemotron_h]",
]


def apply() -> None:
    bind = CachedLayers.bind

    def unbounded(self: CachedLayers, view: BatchView, others: Mapping[int, Any] | None = None) -> Attend:
        if others:
            group = self.groups[0]
            longest = view.page_tables[group.index].shape[1] * group.page_tokens
            view = replace(view, max_length=LengthBound(longest))
        return bind(self, view, others)

    CachedLayers.bind = unbounded  # type: ignore[method-assign, assignment]
