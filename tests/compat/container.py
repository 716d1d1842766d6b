"""Runs the steps of deploy/Containerfile without a container runtime, in a folder in the place of `/`.

    python -m tests.compat.container FOLDER

Files are copied, `RUN pip` lines run in an empty environment (torch from where pip finds it, instead of TORCH_INDEX),
the entry point serves at a free port until the health check passes, and SIGTERM must end it with status 0. Left out:
the base image, packages of the system, and the user.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.compat.place import outside_environment

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 900.0  # seconds until the health check passes; the image's own start period is ten minutes


def steps() -> list[tuple[str, str]]:
    """Instructions and what follows them, continued lines joined."""
    text = re.sub(r"\\\n\s*", " ", (ROOT / "deploy/Containerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def run(folder: Path) -> None:
    source, home = folder / "src", folder / "home"
    for made in (source, home, folder / "cache"):
        made.mkdir(parents=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    environment = outside_environment() | {"PATH": f"{folder}/venv/bin{os.pathsep}{os.environ['PATH']}"}
    commands: dict[str, list[str]] = {}
    for word, rest in steps():
        if word == "ARG":
            name, _, value = rest.partition("=")
            environment[name] = value
        elif word == "ENV":
            environment |= dict(pair.split("=", 1) for pair in rest.replace("/cache", f"{folder}/cache").split())
        elif word == "COPY":
            *given, target = rest.split()
            for name in given:
                to = source / (name if target == "./" else target)
                (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, to)
        elif word == "RUN" and rest.startswith("pip "):
            line = rest.replace('--index-url "$TORCH_INDEX" ', "").replace("/src/", f"{source}/")
            subprocess.run(["sh", "-c", line], cwd=source, env=environment, check=True)
        elif word in ("ENTRYPOINT", "HEALTHCHECK"):
            commands[word] = json.loads(rest[rest.index("[") :])
    _serve(commands["ENTRYPOINT"], commands["HEALTHCHECK"], home, environment)


def _serve(entry: list[str], check: list[str], home: Path, environment: dict[str, str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    asked = [word.replace(":8000/", f":{port}/") for word in check]
    assert "8000" in entry and asked != check
    server = subprocess.Popen([port if word == "8000" else word for word in entry], cwd=home, env=environment)
    try:
        deadline = time.monotonic() + PATIENCE
        while subprocess.run(asked, env=environment, capture_output=True).returncode != 0:
            assert server.poll() is None and time.monotonic() < deadline, "the health check does not pass"
            time.sleep(1)
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    run(Path(sys.argv[1]).resolve())
    print("the steps of the container file work")
