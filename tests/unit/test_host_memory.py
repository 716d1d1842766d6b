"""What counts as free memory of the host."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.core import host_memory
from outrider.core.host_memory import available_bytes


def test_copies_of_files_count_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that was just read fills memory with copies of its files, which the system gives up when asked."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  24000 kB\nMemFree:   500 kB\nMemAvailable:   16000 kB\nCached:  15600 kB\n")
    monkeypatch.setattr(host_memory, "MEMINFO", meminfo)
    assert available_bytes() == 16000 * 1024


def test_another_system_tells_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "MEMINFO", tmp_path / "none")
    assert available_bytes() > 0
