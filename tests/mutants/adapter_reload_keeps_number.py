"""An adapter that is read again keeps the number of its load: requests find pages of the numbers before."""

from __future__ import annotations

from itertools import repeat

from outrider.features.adapters.loads import AdapterRegistry

NAME = "adapter reload keeps number"
TESTS = ["tests/adapters/test_engine.py", "-k", "read_again"]


def apply() -> None:
    begin = AdapterRegistry.begin

    def begin_with_one_number(self: AdapterRegistry, asked: object) -> int:
        self._numbers = repeat(1)  # type: ignore[assignment]
        return begin(self, asked)  # type: ignore[arg-type]

    AdapterRegistry.begin = begin_with_one_number  # type: ignore[method-assign]
