"""Compiled forms are dropped when there are too many, though requests that have not ended need them."""

from __future__ import annotations

from outrider.features.grammars.leases import _Kept

NAME = "leased form dropped"
TESTS = ["tests/engine/test_form_leases.py", "-k", "random or forms_than_are_kept"]


def apply() -> None:
    _Kept.is_leased = property(lambda self: False)  # type: ignore[assignment, method-assign]
