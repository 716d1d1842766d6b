"""What counts as free memory of the host, and that a server gives back what it no longer needs."""

from __future__ import annotations

import ctypes
import subprocess
import sys
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


BUSY_PROCESS = """
import os, threading
from outrider.core.host_memory import give_large_blocks_back

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE") >> 20

give_large_blocks_back()
kept = []

def work():
    for size in (1, 4, 16, 30):
        bytes(size << 20)
    blocks = []
    for _ in range(60):  # what is kept lies between them
        blocks.append(bytearray(b"x") * (1 << 20))
        kept.append(bytes(4000))

before = resident()
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(resident() - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")
def test_a_server_gives_back_what_large_bodies_took() -> None:
    """The C library raises its bound for large blocks as they are freed, and then keeps 240 MB of these."""
    done = subprocess.run([sys.executable, "-c", BUSY_PROCESS], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 50
