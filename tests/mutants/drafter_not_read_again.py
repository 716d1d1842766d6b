"""After a sleep that dropped all weights, those of the drafter are not read again."""

from __future__ import annotations

from outrider.runner.residence import Residence

NAME = "drafter not read again"
TESTS = ["tests/engine/test_sleep.py", "-k", "trained_drafter"]


def apply() -> None:
    Residence._read_drafter = lambda self, given: None  # type: ignore[method-assign]
