"""The test suite's own rule: no test depends on how busy the machine is."""

from __future__ import annotations

import re
from pathlib import Path

from hypothesis import HealthCheck, settings

TESTS = Path(__file__).parents[1]


def test_no_test_of_random_examples_is_timed() -> None:
    """A test that gives `suppress_health_check` replaces the profile's list, in which slowness is suppressed."""
    profile = settings.get_profile("ci")
    assert HealthCheck.too_slow in profile.suppress_health_check and profile.deadline is None
    for path in TESTS.rglob("*.py"):
        if path in (Path(__file__), TESTS / "conftest.py"):
            continue
        for given in re.findall(r"(?:suppress_health_check|\bdeadline)=.*", path.read_text()):
            assert given.startswith(("suppress_health_check=list(HealthCheck)", "deadline=None")), (path, given)
