"""A request that takes a row finds drafts of the last owner there, accepted and not folded."""

from __future__ import annotations

from outrider.core import Admission
from outrider.mixers.recurrent.rows import RecurrentRows

NAME = "f4: pending drafts outlive their request"
TESTS = ["tests/engine/test_f4_states.py", "-k", "accepted_count or padded or ended or reused or skip"]


def apply() -> None:
    admit = RecurrentRows.admit

    def admit_as_it_is(self: RecurrentRows, admissions: list[Admission]) -> None:
        pending = self.pending.clone()
        admit(self, admissions)
        self.pending.copy_(pending)

    RecurrentRows.admit = admit_as_it_is  # type: ignore[method-assign]
