"""A page that waits to be stored is overwritten first."""

from __future__ import annotations

from outrider.cache.observed_pool import PageQueue

NAME = "waiting page overwritten"
TESTS = ["tests/unit/test_observed_pool.py"]


def apply() -> None:
    PageQueue.reuse = lambda self, page, *, was_blank: None  # type: ignore[method-assign]
