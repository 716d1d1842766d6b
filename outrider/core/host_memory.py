"""How much of the host's memory a process may still take. No torch."""

from __future__ import annotations

import os
import re
from pathlib import Path

MEMINFO = Path("/proc/meminfo")


def available_bytes() -> int:
    """Free bytes, with those that hold copies of files: the system gives them up at once, and after a model was read or
    copied they may be most of the memory. Without /proc only what is free counts."""
    try:
        found = re.search(r"^MemAvailable:\s*(\d+) kB", MEMINFO.read_text(encoding="utf-8"), re.M)
    except OSError:  # another system
        found = None
    return 1024 * int(found[1]) if found else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
