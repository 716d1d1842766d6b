"""What must not count is multiplied by zero: NaN in a row of nobody reaches the others."""

from __future__ import annotations

import torch

from outrider.mixers.recurrent import torch_backend

NAME = "f4: masked by multiplying"
TESTS = [
    "tests/engine/test_f4_states.py::test_f4_padded_and_dead_tokens_beside_all_kinds_of_requests",
    "tests/engine/test_f4_states.py::test_f4_a_reused_row_never_sees_its_former_owner",
    "tests/engine/test_f4_states.py::test_f4_a_row_that_ended_is_not_touched_and_can_still_be_folded",
    "tests/engine/test_f4_states.py::test_f4_rows_that_skip_steps_keep_what_waits",
    "tests/engine/test_f4_states.py::test_f4_every_accepted_count_around_a_boundary",
]


def apply() -> None:
    def weighed(mask: torch.Tensor, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        weight = mask.view(-1, *[1] * (new.dim() - 1)).to(new.dtype)
        return weight * new + (1 - weight) * old

    torch_backend.selected = weighed
