"""A request that takes a row begins from what the last owner left in its state."""

from __future__ import annotations

from outrider.core import Admission
from outrider.mixers.recurrent.recurrent_rows import RecurrentRows

NAME = "f4: a row's state outlives its request"
TESTS = [
    "tests/engine/test_f4_states.py::test_f4_padded_and_dead_tokens_beside_all_kinds_of_requests",
    "tests/engine/test_f4_states.py::test_f4_a_reused_row_never_sees_its_former_owner",
    "tests/engine/test_f4_states.py::test_f4_a_row_that_ended_is_not_touched_and_can_still_be_folded",
    "tests/engine/test_f4_states.py::test_f4_rows_that_skip_steps_keep_what_waits",
    "tests/engine/test_f4_states.py::test_f4_every_accepted_count_around_a_boundary",
]


def apply() -> None:
    admit = RecurrentRows.admit

    def admit_as_it_is(self: RecurrentRows, admissions: list[Admission]) -> None:
        states = {layer: own.state.clone() for layer, own in self.layers.items()}
        admit(self, admissions)
        for layer, own in self.layers.items():
            own.state.copy_(states[layer])

    RecurrentRows.admit = admit_as_it_is  # type: ignore[method-assign]
