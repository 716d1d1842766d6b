"""Marks of wall and processor time, and the share of the machine that other programs used between two of them.

Two engines can be compared by the clock only on a machine without other work. Where other programs run, the processor
time that an engine uses still tells something, and the share that the others used says how much.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

IDLE, IO_WAIT = 3, 4  # columns of the first line of /proc/stat in which no processor worked
SHARED = 0.1  # of the machine's time: with more than this taken by other programs the clock does not tell


@dataclass(frozen=True)
class Mark:
    """Seconds since a common beginning: by the clock, of the processors for one program, and for all programs. None
    where the system does not tell."""

    wall: float
    own: float | None
    everyone: float | None

    def towards(self, later: Mark, wall: float) -> Mark:
        """The mark at a time between this one and a later one, if both grow evenly."""
        share = (wall - self.wall) / (later.wall - self.wall)
        own, everyone = (None if old is None or new is None else old + (new - old) * share
                         for old, new in ((self.own, later.own), (self.everyone, later.everyone)))
        return Mark(wall, own, everyone)


@dataclass(frozen=True)
class Span:
    """What passed between two marks."""

    wall: float
    own: float | None
    others: float | None  # share of the machine's processors that other programs used

    @classmethod
    def between(cls, first: Mark, last: Mark) -> Span:
        wall = max(last.wall - first.wall, 1e-9)
        if first.own is None or last.own is None:
            return cls(wall, None, None)
        own = last.own - first.own
        if first.everyone is None or last.everyone is None:
            return cls(wall, own, None)
        taken = last.everyone - first.everyone - own
        return cls(wall, own, min(1.0, max(0.0, taken / wall / (os.cpu_count() or 1))))


def mark_own() -> Mark:
    """A mark of this process."""
    return Mark(time.perf_counter(), time.process_time(), _everyones_time())


def mark_process(process_id: int) -> Mark:
    """A mark of another process, with all its threads."""
    return Mark(time.perf_counter(), _process_time(process_id), _everyones_time())


def _everyones_time() -> float | None:
    """Processor seconds of all programs, in which a virtual machine counts what its host took from it."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            numbers = [int(word) for word in file.readline().split()[1:9]]
    except (OSError, ValueError):
        return None
    return (sum(numbers) - numbers[IDLE] - numbers[IO_WAIT]) / os.sysconf("SC_CLK_TCK")


def _process_time(process_id: int) -> float | None:
    try:
        text = Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8", errors="replace")
        user, system = text.rpartition(")")[2].split()[11:13]  # the name before it may hold spaces
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return None
