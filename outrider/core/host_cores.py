"""The CPU cores that this process may use."""

from __future__ import annotations

import os


def num_cores() -> int:
    """How many cores the system lets this process run on; all of the machine's where it does not say."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
