"""The alarm when drafts are no longer accepted after an update of the weights."""

from __future__ import annotations

import pytest

from outrider.engine.acceptance_alarm import LEAST_DRAFTS, AcceptanceAlarm
from outrider.engine.stats import EngineStats


class Rig:
    def __init__(self) -> None:
        self.version, self.stats = 0, EngineStats(accepted_per_position=[0])
        self.alarm = AcceptanceAlarm(self.stats, lambda: self.version)

    def draft(self, accepted: int, drafted: int = LEAST_DRAFTS) -> int:
        """Returns how often the alarm has rung."""
        self.stats.num_drafts += drafted
        self.stats.accepted_per_position[0] += accepted
        self.alarm.flush()
        return self.stats.num_acceptance_losses

    def update(self) -> None:
        self.version += 1
        self.alarm.flush()


def test_it_rings_once_when_no_draft_is_accepted_after_an_update(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    assert rig.draft(40) == 0
    rig.update()
    assert rig.draft(0, LEAST_DRAFTS - 1) == 0, "too few to tell"
    assert rig.draft(0, 1) == 1 and rig.draft(0) == 1
    assert "not accepted since version 1" in caplog.text and "62% of first drafts" in caplog.text
    rig.update()
    assert rig.draft(0) == 2, "the next update has not mended it"
    rig.update()
    assert rig.draft(30) == 2
    rig.update()
    assert rig.draft(10) == 2, "fewer are no loss"


def test_it_does_not_ring_where_drafts_were_never_accepted() -> None:
    rig = Rig()
    rig.draft(1)
    rig.update()
    assert rig.draft(0) == 0
    rig.update()
    rig.draft(0, LEAST_DRAFTS // 2)
    rig.update()
    assert rig.draft(0) == 0
