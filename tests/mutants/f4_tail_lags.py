"""The inputs that the convolution looks back on are not advanced by the drafts that are folded."""

from __future__ import annotations

import torch

from outrider.mixers.recurrent.recurrent_mixer import Gates
from outrider.mixers.recurrent.torch_backend import TorchStep, Walk

NAME = "f4: the conv tail is not folded"
TESTS = [
    "tests/engine/test_f4_states.py::test_f4_padded_and_dead_tokens_beside_all_kinds_of_requests",
    "tests/engine/test_f4_states.py::test_f4_a_reused_row_never_sees_its_former_owner",
    "tests/engine/test_f4_states.py::test_f4_a_row_that_ended_is_not_touched_and_can_still_be_folded",
    "tests/engine/test_f4_states.py::test_f4_rows_that_skip_steps_keep_what_waits",
    "tests/engine/test_f4_states.py::test_f4_every_accepted_count_around_a_boundary",
]


def apply() -> None:
    run, step = TorchStep.run, Walk.step

    def folding_without_tail(self: TorchStep, layer: int, conv_in: torch.Tensor, gates: Gates) -> torch.Tensor:
        num_folds = self.counts.most_pending

        def without_tail(walk: Walk, conv_in: torch.Tensor, gates: Gates, moves: torch.Tensor) -> torch.Tensor:
            nonlocal num_folds
            tail = walk.tail
            y = step(walk, conv_in, gates, moves)
            if num_folds > 0:
                walk.tail = tail
            num_folds -= 1
            return y

        Walk.step = without_tail  # type: ignore[method-assign]
        return run(self, layer, conv_in, gates)

    TorchStep.run = folding_without_tail  # type: ignore[method-assign]
