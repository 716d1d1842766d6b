"""Pages beyond the device are keyed without the version of the weights: an engine finds those of another update."""

from __future__ import annotations

from outrider.cache.media import PageMedia

NAME = "page key without weights"
TESTS = ["tests/tiers/test_faults.py", "-k", "other_weights"]


def apply() -> None:
    def keep_keys(self: PageMedia, version: int) -> None:
        pass

    PageMedia.use_weights = keep_keys  # type: ignore[method-assign]
