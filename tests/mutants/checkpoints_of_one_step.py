"""A request may hold the checkpoints of one step, though the steps in flight after it want some too."""

from __future__ import annotations

from dataclasses import replace

from outrider.cache.kinds import RecurrentKind, RowCapacity
from outrider.core import Limits

NAME = "f4: steps in flight are not counted among checkpoints"
TESTS = ["tests/unit/test_recurrent_cache.py::test_every_step_in_flight_gets_all_the_checkpoints_that_it_wants"]


def apply() -> None:
    capacity = RecurrentKind.capacity

    def of_one_step(self: RecurrentKind, limits: Limits) -> RowCapacity:
        return capacity(self, replace(limits, steps_in_flight=1))

    RecurrentKind.capacity = of_one_step  # type: ignore[method-assign]
