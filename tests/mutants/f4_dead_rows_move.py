"""A row that ended while the host ran ahead loses the drafts that wait to be folded."""

from __future__ import annotations

import torch

from outrider.mixers.recurrent.recurrent_mixer import Gates, LayerRows
from outrider.mixers.recurrent.torch_backend import TorchStep

NAME = "f4: dead rows lose their window"
TESTS = [
    "tests/engine/test_f4_states.py::test_f4_padded_and_dead_tokens_beside_all_kinds_of_requests",
    "tests/engine/test_f4_states.py::test_f4_a_reused_row_never_sees_its_former_owner",
    "tests/engine/test_f4_states.py::test_f4_a_row_that_ended_is_not_touched_and_can_still_be_folded",
    "tests/engine/test_f4_states.py::test_f4_rows_that_skip_steps_keep_what_waits",
    "tests/engine/test_f4_states.py::test_f4_every_accepted_count_around_a_boundary",
]


def apply() -> None:
    keep = TorchStep._keep_window

    def keep_of_all(self: TorchStep, rows: LayerRows, conv_in: torch.Tensor, gates: Gates) -> None:
        is_live, self._is_live = self._is_live, torch.ones_like(self._is_live)
        keep(self, rows, conv_in, gates)
        self._is_live = is_live

    TorchStep._keep_window = keep_of_all  # type: ignore[method-assign]
