"""The tests of this folder that run in other processes (see conftest.py): each must have passed."""

from __future__ import annotations

import pytest

from tests.gpu.conftest import num_processes

NOTHING_COLLECTED = 5


@pytest.mark.parametrize("other_process", range(1, max(2, num_processes())), indirect=True)
def test_other_processes(other_process: tuple[int, str]) -> None:
    status, summary = other_process
    assert status in (0, NOTHING_COLLECTED), summary
