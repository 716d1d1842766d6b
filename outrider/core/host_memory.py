"""Host memory: how much a process may still take, and how it returns freed memory to the system. No torch."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
LARGE_BLOCK = 1 << 17  # bytes: the C library's own bound, which it raises to 32 MiB as large blocks are freed
MOST_ARENAS = 2  # of the C library, each of which keeps what was freed in it
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # of malloc.h


def available_bytes() -> int:
    """Return the bytes that a process may take. This includes the system's file cache, which is freed on demand and may
    be most of the memory after a model was read. On systems without /proc only free memory counts."""
    try:
        found = re.search(r"^MemAvailable:\s*(\d+) kB", MEMINFO.read_text(encoding="utf-8"), re.M)
    except OSError:  # another system
        found = None
    return 1024 * int(found[1]) if found else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def give_large_blocks_back() -> None:
    """Make glibc return large blocks of memory to the system as soon as they are freed; other C libraries are left as
    they are. Otherwise a server keeps the memory of a few large request bodies, up to 600 MB, until it ends."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in ((M_MMAP_THRESHOLD, LARGE_BLOCK), (M_TRIM_THRESHOLD, LARGE_BLOCK),
                              (M_ARENA_MAX, MOST_ARENAS)):
            mallopt(option, value)
