"""The commands and the Python of the README, as they are printed, and how to run them somewhere else.

    python -m tests.compat.readme FOLDER      builds the wheel, installs it into a fresh environment, runs everything
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PORT = 8000  # as the README says


def readme() -> str:
    return (ROOT / "README.md").read_text()


def commands() -> list[str]:
    """Lines of indented blocks, without their comments."""
    lines = re.findall(r"^ {4}((?:outrider|pip|make) .*)$", readme(), re.M)
    return [re.split(r"\s{2,}#", line)[0].strip() for line in lines]


def request() -> list[str]:
    """The command that asks the server."""
    (found,) = re.findall(r"^ {4}(curl .*\\\n.*)$", readme(), re.M)
    return shlex.split(found.replace("\\\n", ""))


def programs() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", readme(), re.M | re.S)


def outside_environment() -> dict[str, str]:
    """The variables of this process without those that lead Python to this tree or to this environment."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


@dataclass(frozen=True)
class Place:
    """An environment that has outrider installed, and a folder to work in."""

    bin: Path
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        return outside_environment() | {"PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}"}

    def run(self, command: str, timeout: float = 1800) -> subprocess.CompletedProcess[str]:
        answers = "Say hello.\n/exit\n" if command.startswith("outrider chat") else ""
        return subprocess.run(shlex.split(command), cwd=self.folder, env=self.environment, input=answers, text=True,
                              capture_output=True, timeout=timeout)

    def python(self, program: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
        return subprocess.run([str(self.bin / "python"), "-c", program], cwd=self.folder, env=self.environment,
                              text=True, capture_output=True, timeout=timeout)

    def serve(self, command: str, timeout: float = 120) -> int:
        """Starts a server, waits until it is ready, asks it, ends it as Ctrl-C does, and returns its exit code."""
        server = subprocess.Popen(shlex.split(command), cwd=self.folder, env=self.environment)
        try:
            deadline = time.monotonic() + timeout
            while time.monotonic() < deadline and server.poll() is None:
                try:
                    if urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=5).status == 200:
                        break
                except OSError:
                    time.sleep(0.5)
            else:
                raise AssertionError(f"{command}: not ready after {timeout} s")
            if shutil.which("curl"):
                assert b'"content"' in subprocess.run(request(), capture_output=True, timeout=timeout).stdout
            server.send_signal(signal.SIGINT)
            return server.wait(60)
        finally:
            server.kill()


def install(folder: Path) -> Place:
    """A fresh environment with the wheel of this tree and its server, and nothing else."""

    def run(*command: str | Path) -> None:
        subprocess.run(list(map(str, command)), check=True, env=outside_environment(), cwd=folder)

    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, copy_sources(folder / "source"))
    (wheel,) = folder.glob("outrider-*.whl")
    run(sys.executable, "-m", "venv", folder / "venv")
    pip = (folder / "venv/bin/python", "-m", "pip", "install", "-q", "--disable-pip-version-check")
    torch = re.search(r"^torch==.*$", (ROOT / "constraints.txt").read_text(), re.M)
    assert torch is not None
    run(*pip, torch[0])  # alone and first, as make does
    run(*pip, "-c", ROOT / "constraints.txt", f"{wheel}[server]")
    work = folder / "work"
    work.mkdir()
    return Place(folder / "venv/bin", work)


def copy_sources(target: Path) -> Path:
    """The files that a wheel is made from, elsewhere: a build leaves folders behind, and takes up what others left."""
    shutil.copytree(ROOT / "outrider", target / "outrider", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, target / name)
    return target


def run_all(place: Place) -> None:
    for command in commands():
        if command.startswith(("pip", "make")):
            continue  # what `install` and whoever runs the tests have done
        start = time.monotonic()
        if command.startswith("outrider serve"):
            assert place.serve(command) == 0, command
        else:
            ran = place.run(command)
            assert ran.returncode == 0, f"{command}\n{ran.stdout}\n{ran.stderr}"
        print(f"{time.monotonic() - start:6.1f} s  {command}", flush=True)
    for program in programs():
        ran = place.python(program)
        assert ran.returncode == 0, f"{program}\n{ran.stdout}\n{ran.stderr}"
        print(ran.stdout, flush=True)


if __name__ == "__main__":
    target = Path(sys.argv[1]).resolve()
    target.mkdir(parents=True)
    os.environ["HOME"] = str(target)
    run_all(install(target))
