"""The drafter gets the features of a step's own tokens instead of those one place ahead."""

from __future__ import annotations

from typing import Any

from outrider.runner import step_inputs

NAME = "image features one place off"
TESTS = ["tests/images/test_matrix.py", "-k", "drafts_alike"]


def apply() -> None:
    find = step_inputs.find_given_rows

    def without_place_ahead(*args: Any, ahead: int, **options: Any) -> Any:
        return find(*args, ahead=0, **options)

    step_inputs.find_given_rows = without_place_ahead
