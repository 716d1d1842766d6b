"""A request that takes a row begins from what the last owner left in its state."""

from __future__ import annotations

from outrider.core import Admission
from outrider.mixers.recurrent.rows import RecurrentRows

NAME = "f4: a row's state outlives its request"
TESTS = ["tests/engine/test_f4_states.py", "-k", "accepted_count or padded or ended or reused or skip"]


def apply() -> None:
    admit = RecurrentRows.admit

    def admit_as_it_is(self: RecurrentRows, admissions: list[Admission]) -> None:
        states = {layer: own.state.clone() for layer, own in self.layers.items()}
        admit(self, admissions)
        for layer, own in self.layers.items():
            own.state.copy_(states[layer])

    RecurrentRows.admit = admit_as_it_is  # type: ignore[method-assign]
