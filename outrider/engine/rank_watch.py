"""RankWatch: finds out that a rank has died, hangs or was left behind by the others, and names it. No torch.

A rank's process counts up its heartbeats in shared memory. A process that is stopped no longer counts. A process that
hangs still counts, but makes no progress. Ranks that wait in an all-reduce are not at fault then; the remaining ranks
are. Time counts only while the parent itself runs, so that ranks survive when the machine or the group of processes is
suspended."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from outrider.engine.script_import import UNGUARDED, UNGUARDED_ADVICE
from outrider.runner.interface import WorkerDied
from outrider.runner.rank_status import RankStatus

LOOK_SECONDS = 0.5  # between two looks at the ranks
SILENT_SECONDS = 60.0  # without a sign of life, until a rank is given up
# The same while it starts: libraries of torch, read from a slow disk or beside many other ranks, hold up all threads
# of a process.
STARTING_SILENT_SECONDS = 300.0
STUCK_SECONDS = 300.0  # that steps may wait while no rank makes progress; a layer may take long on a CPU
COMMAND_SECONDS = 3600.0  # the same for start-up and commands, which may read weights from a slow disk
STRAGGLER_SECONDS = 30.0  # that ranks may take to fail in a step in which another rank failed


class Process(Protocol):
    """The methods of a rank's process that its parent uses. The process may run on another machine."""

    @property
    def pid(self) -> int | None: ...

    @property
    def exitcode(self) -> int | None: ...

    def join(self, timeout: float | None = None) -> None: ...

    def kill(self) -> None: ...


@dataclass
class RankProcess:
    """A rank's process, with the status that the process shares with its parent."""

    rank: int
    process: Process
    status: RankStatus
    place: str = ""  # where there are several machines: words for the rank's

    @property
    def words(self) -> str:
        return f"rank {self.rank}{self.place} (process {self.process.pid}) {self.status.words}"

    @property
    def loss(self) -> str:
        """Return the reason why the connection to the process is lost; always empty for a local process."""
        return ""


class RankWatch:
    def __init__(self, ranks: Sequence[RankProcess]) -> None:
        self._ranks = ranks
        self._beats = [(0, 0.0) for _ in ranks]  # last count, and for how many seconds it has not changed
        self._progress: tuple[list[int], float] = [], 0.0
        self._dead: set[int] = set()  # ranks that had ended at the last look

    def look(self, seconds: float, *, has_steps: bool, has_any: bool) -> WorkerDied | None:
        """Check the ranks. Returns an error that names a rank if the ranks cannot go on. seconds: the time since the
        last check. has_steps: whether a step waits for an answer. has_any: whether any message does."""
        seconds = min(seconds, 2 * LOOK_SECONDS)
        for index, own in enumerate(self._ranks):
            if own.process.exitcode is not None:
                if own.rank in self._dead:
                    return death_of(own, len(self._ranks))
                self._dead.add(own.rank)  # its last messages may not be read yet
                continue
            before, silent = self._beats[index]
            beats = own.status.beats
            # Before its first sign of life a rank imports the caller's script, which may take long.
            silent = silent + seconds if beats == before and beats > 0 else 0.0
            self._beats[index] = beats, silent
            if silent > (STARTING_SILENT_SECONDS if own.status.is_starting else SILENT_SECONDS):
                return WorkerDied(f"{own.words} and has shown no life for {silent:.0f} s: it may be stopped, or the "
                                  "machine may lack memory")
        return self._look_for_progress(seconds, STUCK_SECONDS if has_steps else COMMAND_SECONDS, has_any)

    def _look_for_progress(self, seconds: float, limit: float, has_any: bool) -> WorkerDied | None:
        now = [own.status.progress for own in self._ranks]
        before, stuck = self._progress
        stuck = stuck + seconds if has_any and now == before else 0.0
        self._progress = now, stuck
        return None if stuck <= limit else WorkerDied(f"nothing has moved for {stuck:.0f} s: {self.blamed()}")

    def blamed(self) -> str:
        """Describe the ranks that hold up the rest: those that do not wait for another rank, or all ranks if every rank
        waits."""
        busy = [own for own in self._ranks if not own.status.is_waiting]
        return ", ".join(own.words for own in busy or self._ranks)


def death_of(own: RankProcess, num_ranks: int, when: str = "") -> WorkerDied:
    """Make the error for a rank whose process has died. when: words for the time of its death, in place of the rank's
    last activity."""
    if own.loss:
        return WorkerDied(own.loss)
    code = own.process.exitcode
    if code == UNGUARDED:
        return WorkerDied(UNGUARDED_ADVICE)
    how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
    if num_ranks == 1:
        who = f"the worker process died {when}".rstrip()
    else:
        who = f"the process of rank {own.rank}{own.place} died {when or f'when it {own.status.words}'}"
    return WorkerDied(f"{who} ({how}): its own messages may say why; on Linux, SIGKILL often means that the machine "
                      "had no memory left")
