"""F4: a rejected draft is folded like an accepted one, so that the next step begins from the wrong state."""

from __future__ import annotations

import torch

from outrider.mixers.recurrent.recurrent_mixer import RecurrentStep

NAME = "f4: rejected drafts are folded"
TESTS = [
    "tests/engine/test_f4_states.py::test_f4_padded_and_dead_tokens_beside_all_kinds_of_requests",
    "tests/engine/test_f4_states.py::test_f4_a_reused_row_never_sees_its_former_owner",
    "tests/engine/test_f4_states.py::test_f4_a_row_that_ended_is_not_touched_and_can_still_be_folded",
    "tests/engine/test_f4_states.py::test_f4_rows_that_skip_steps_keep_what_waits",
    "tests/engine/test_f4_states.py::test_f4_every_accepted_count_around_a_boundary",
]


def apply() -> None:
    keep = RecurrentStep.keep_drafts

    def keep_all(self: RecurrentStep, pending: torch.Tensor, num_accepted: torch.Tensor) -> None:
        keep(self, pending, self.counts.num_drafts)

    RecurrentStep.keep_drafts = keep_all  # type: ignore[method-assign]
