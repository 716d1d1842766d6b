"""The CPU cores that this process may use."""

from __future__ import annotations

import os


def num_cores() -> int:
    """Return the number of cores that this process may run on, or all cores of the machine if the system does not
    report it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
