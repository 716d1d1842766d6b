"""Pages of a load that was cancelled are read and filled, though other requests have them by then."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.features.tiers.loader import Loader

NAME = "cancelled load fills pages"
TESTS = ["tests/tiers/test_faults.py", "-k", "was_cancelled"]


def apply() -> None:
    def go_on(self: Loader, loads: Sequence[int]) -> None:
        pass

    Loader.cancel = go_on  # type: ignore[method-assign]
