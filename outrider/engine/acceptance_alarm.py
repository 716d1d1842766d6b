"""AcceptanceAlarm: warns if a drafter's drafts are no longer accepted after an update of the weights.

The generated text stays right, so nothing else would show that an update left out the drafter's weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from outrider.engine.stats import EngineStats
from outrider.engine.step_watcher import StepWatcher

log = logging.getLogger("outrider")
LEAST_DRAFTS = 64  # drafts that a share is known from
USUAL = 0.1  # share of first drafts that was accepted before, at least
NOTHING = 0.01  # share that is as good as none


class AcceptanceAlarm(StepWatcher):
    """Compares, after each update of the weights, the share of first drafts that are accepted with the share before the
    update."""

    def __init__(self, stats: EngineStats, version: Callable[[], int]) -> None:
        """version: function that returns the current version of the weights."""
        self._stats, self._version = stats, version
        self._seen = version()
        self._drafted = self._accepted = 0  # when this version began
        self._before = 0.0  # the share under the last version that had enough drafts
        self._is_known = False  # enough drafts were compared under this version

    def flush(self) -> None:
        if self._version() != self._seen:
            self._begin_version()
        if self._is_known:
            return
        drafted, accepted = self._counts()
        if drafted - self._drafted < LEAST_DRAFTS:
            return
        self._is_known = True
        share = (accepted - self._accepted) / (drafted - self._drafted)
        if self._before >= USUAL and share <= NOTHING:
            self._stats.num_acceptance_losses += 1
            log.warning("drafts are not accepted since version %d of the weights: %.0f%% of first drafts were accepted "
                        "before, now %.0f%% of %d; the drafter's weights may be missing in the update",
                        self._seen, 100 * self._before, 100 * share, drafted - self._drafted)

    def _begin_version(self) -> None:
        drafted, accepted = self._counts()
        if drafted - self._drafted >= LEAST_DRAFTS:
            share = (accepted - self._accepted) / (drafted - self._drafted)
            self._before = share if share > NOTHING else self._before  # an alarm is repeated under the next version
        self._seen, self._drafted, self._accepted, self._is_known = self._version(), drafted, accepted, False

    def _counts(self) -> tuple[int, int]:
        """Return how many first drafts were checked so far, and how many of them were accepted."""
        stats = self._stats
        return stats.num_drafts, stats.accepted_per_position[0] if stats.accepted_per_position else 0
