"""A row that ended while the host ran ahead loses the drafts that wait to be folded."""

from __future__ import annotations

import torch

from outrider.mixers.recurrent.base import Gates, LayerRows
from outrider.mixers.recurrent.torch_backend import TorchStep

NAME = "f4: dead rows lose their window"
TESTS = ["tests/engine/test_f4_states.py", "-k", "accepted_count or padded or ended or reused or skip"]


def apply() -> None:
    keep = TorchStep._keep_window

    def keep_of_all(self: TorchStep, rows: LayerRows, conv_in: torch.Tensor, gates: Gates) -> None:
        is_live, self._is_live = self._is_live, torch.ones_like(self._is_live)
        keep(self, rows, conv_in, gates)
        self._is_live = is_live

    TorchStep._keep_window = keep_of_all  # type: ignore[method-assign]
