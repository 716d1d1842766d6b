"""Place: an environment that has outrider installed, and a folder in which commands and programs run as for a user."""

from __future__ import annotations

import os
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path


def outside_environment() -> dict[str, str]:
    """The variables of this process without those that lead Python to this tree or to this environment."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


@dataclass(frozen=True)
class Place:
    bin: Path
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        return outside_environment() | {"PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}"}

    def run(self, command: str, timeout: float = 1800) -> subprocess.CompletedProcess[str]:
        """Runs a command line. A chat gets a question, and other commands get a beginning to continue."""
        typed = "Say hello.\n/exit\n" if command.startswith("outrider chat") else "Once upon a time"
        return subprocess.run(shlex.split(command), cwd=self.folder, env=self.environment, input=typed, text=True,
                              capture_output=True, timeout=timeout)

    def python(self, program: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
        return subprocess.run([str(self.bin / "python"), "-c", program], cwd=self.folder, env=self.environment,
                              text=True, capture_output=True, timeout=timeout)
