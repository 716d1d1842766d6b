"""F5: a step whose tiles do not fit into the index buffer gets another buffer, which no captured graph reads."""

from __future__ import annotations

import torch

from outrider.cache.groups import Group
from outrider.mixers.batch import BatchView
from outrider.mixers.paged.flex_backend import FlexBackend

NAME = "f5: an index buffer that is too small is made anew"
TESTS = ["tests/engine/test_f5.py::test_f5_a_step_that_the_index_buffer_cannot_hold_is_refused"]


def apply() -> None:
    index_buffer = FlexBackend._index_buffer

    def made_anew(self: FlexBackend, view: BatchView, group: Group, tiles: int, width: int) -> torch.Tensor:
        try:
            return index_buffer(self, view, group, tiles, width)
        except ValueError:
            return torch.zeros(tiles, width + 1, dtype=torch.int32, device=view.lengths.device)

    FlexBackend._index_buffer = made_anew  # type: ignore[method-assign]
