"""An evicted page is stored when the load that takes its place may have filled it already."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.features.tiers.copies import HostCopies, Store
from outrider.features.tiers.loader import StagedPage

NAME = "page stored after a load"
TESTS = ["tests/tiers/test_faults.py", "-k", "takes_its_place"]


def apply() -> None:
    store, fill = HostCopies.store, HostCopies.fill
    waiting: list[tuple[int, Store]] = []

    def store_later(self: HostCopies, pages: Sequence[tuple[int, Store]]) -> None:
        waiting.extend(pages)

    def fill_first(self: HostCopies, staged: Sequence[StagedPage]) -> None:
        fill(self, staged)
        store(self, waiting)
        waiting.clear()

    HostCopies.store, HostCopies.fill = store_later, fill_first  # type: ignore[method-assign]
