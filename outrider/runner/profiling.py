"""Commands that record a worker's work between two moments, with torch's profiler, on the thread of its steps."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from outrider.runner.commands import Command

# By worker: a torch.profiler.profile, and the prefix of its file.
_running: WeakKeyDictionary[Any, tuple[Any, str]] = WeakKeyDictionary()


@dataclass(frozen=True)
class StartProfile(Command[None]):
    """Begin to record a profile. Only one recording can run at a time."""

    prefix: str | None = None  # of the file's name

    def carry_out(self, worker: Any) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        if worker in _running:
            raise ValueError("a profile is being recorded: call stop_profile first")
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        recording = profile(activities=activities)
        recording.start()
        _running[worker] = (recording, Path(self.prefix or "outrider").name)


@dataclass(frozen=True)
class StopProfile(Command[str]):
    """Stop recording, write the profile to a file for chrome://tracing or Perfetto, and return its path."""

    folder: str

    def carry_out(self, worker: Any) -> str:
        if worker not in _running:
            raise ValueError("no profile is being recorded: call start_profile first")
        recording, prefix = _running.pop(worker)
        recording.stop()
        path = Path(self.folder).expanduser()
        path.mkdir(parents=True, exist_ok=True)
        file = path / f"{prefix}-{os.getpid()}-{time.time_ns()}.json.gz"
        recording.export_chrome_trace(str(file))
        return str(file)
