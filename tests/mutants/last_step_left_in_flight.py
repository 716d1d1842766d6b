"""A call returns when its last request has ended, whatever steps are in flight then."""

from __future__ import annotations

from outrider.engine.request_loop import RequestLoop

NAME = "last step left in flight"
TESTS = ["tests/engine/test_callers.py", "-k", "no_way_of_ending"]


def apply() -> None:
    RequestLoop._finish_steps = lambda self: None  # type: ignore[method-assign]
