"""How much of the host's memory a process may still take. No torch."""

from __future__ import annotations

import os
import re
from pathlib import Path

MEMINFO = Path("/proc/meminfo")


def available_bytes() -> int:
    """Bytes that a process may take, including memory that caches copies of files: the system frees it at once, and
    after a model was read it may be most of the memory. Without /proc only free memory counts."""
    try:
        found = re.search(r"^MemAvailable:\s*(\d+) kB", MEMINFO.read_text(encoding="utf-8"), re.M)
    except OSError:  # another system
        found = None
    return 1024 * int(found[1]) if found else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
