"""A command is carried out at once, while steps that were submitted before it still wait for their turn."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from outrider.runner.local import LocalRunner

NAME = "command out of order"
TESTS = ["tests/engine/test_commands.py", "-k", "after_the_steps_before_it"]
Made = TypeVar("Made")


def apply() -> None:
    def at_once(self: LocalRunner, work: Callable[[], Made]) -> Future[Made]:
        done: Future[Made] = Future()
        done.set_result(work())
        return done

    LocalRunner.in_order = at_once  # type: ignore[method-assign]
