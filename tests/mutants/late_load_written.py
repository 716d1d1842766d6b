"""Pages that come after their load was given up are copied to the device's pages, which other requests may hold."""

from __future__ import annotations

from outrider.features.tiers.loader import BegunLoad, Loader, Reader, StagedPage

NAME = "late load written"
TESTS = ["tests/tiers/test_hanging.py"]


def apply() -> None:
    def stage(self: Loader, reader: Reader, load: BegunLoad, staged: StagedPage) -> None:
        with self._changed:
            load.num_staged += 1
            self._staged.append(staged)
            self._changed.notify_all()

    def answer(self: Loader, reader: Reader, name: str, began: float, is_found: bool, error: Exception | None) -> bool:
        return True

    Loader._stage, Loader._end_asking = stage, answer  # type: ignore[method-assign]
