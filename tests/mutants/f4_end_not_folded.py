"""A row that ended with drafts pending saves the state it has, as if they had been folded."""

from __future__ import annotations

import torch

from outrider.kernels.recurrent import CheckpointTargets
from outrider.mixers.recurrent.checkpoint_pages import RecurrentState
from outrider.mixers.recurrent.torch_backend import TorchRecurrent

NAME = "f4: the end is not folded"
TESTS = [
    "tests/engine/test_f4_states.py::test_f4_a_fold_stops_at_its_boundary",
    "tests/engine/test_f4_states.py::test_f4_a_row_that_ended_is_not_touched_and_can_still_be_folded",
]


def apply() -> None:
    def save_as_it_is(self: TorchRecurrent, rows: torch.Tensor, computed: torch.Tensor, pending: torch.Tensor,
                      targets: CheckpointTargets) -> None:
        for layer, own in self.rows.items():
            self.pages.write(layer, RecurrentState(own.state[rows], own.tail[rows]), targets.pages, pending > 0)

    TorchRecurrent.fold_ended = save_as_it_is  # type: ignore[method-assign]
