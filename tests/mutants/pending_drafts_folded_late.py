"""Weights change under running requests before accepted drafts are folded, so that the new weights fold them."""

from __future__ import annotations

from outrider.mixers.recurrent import RecurrentRows

NAME = "pending drafts folded late"
TESTS = ["tests/engine/test_pause.py", "-k", "go_on_in_place and Mamba"]


def apply() -> None:
    def leave_pending(self: RecurrentRows) -> None:
        pass

    RecurrentRows.fold_pending = leave_pending  # type: ignore[method-assign]
