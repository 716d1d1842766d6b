"""The main speeds of this commit on this machine, compared with the last ones that were accepted here.

    python bench/track.py               # `make bench-track`; about two minutes on two idle cores
    python bench/track.py --accept      # the figures become the ones to compare with, even where they are worse

Every run adds a line of JSON to `bench/track.jsonl`, which stays on this machine: figures of two machines say nothing
about each other. The run fails if a figure is worse than in the last accepted line by more than its noise: the share by
which two runs of one commit may differ on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.commands.env import cpu_name

ROOT = Path(__file__).parents[1]
FILE = ROOT / "bench/track.jsonl"
PROMPT = 512
SHAPES = ("1x128x64", "8x128x64", f"1x{PROMPT}x1")


@dataclass(frozen=True)
class Figure:
    name: str
    unit: str
    noise: float  # relative
    is_better_higher: bool = True

    def is_worse(self, now: float, before: float) -> bool:
        return now < before * (1 - self.noise) if self.is_better_higher else now > before * (1 + self.noise)


FIGURES = (
    Figure("one_request", "tok/s", 0.10),
    Figure("eight_requests", "tok/s", 0.10),
    Figure("prompt", "tok/s", 0.10),
    Figure("start_up", "s", 0.30, is_better_higher=False),
    Figure("host_step_256", "us", 0.10, is_better_higher=False),
)


def worse(now: dict[str, float], before: dict[str, float]) -> list[str]:
    """One line for each figure that is worse than before by more than its noise. New figures are not compared."""
    return [
        f"{figure.name}: {now[figure.name]:g} {figure.unit}, before {before[figure.name]:g}"
        f" ({now[figure.name] / before[figure.name] - 1:+.0%}, noise {figure.noise:.0%})"
        for figure in FIGURES
        if figure.name in before and figure.is_worse(now[figure.name], before[figure.name])
    ]


def last_accepted(lines: Iterable[str], machine: str) -> dict[str, Any] | None:
    """The newest line of this machine that did not fail."""
    runs = [json.loads(line) for line in lines]
    return next((run for run in reversed(runs) if run["machine"] == machine and run["is_accepted"]), None)


def measure() -> dict[str, float]:
    flags = ["--shapes", ",".join(SHAPES), "--rounds", "3", "--max-model-len", "1024"]
    speeds = last_json("-m", "outrider", "bench", "throughput", "smollm2", *flags)
    one, eight, prompt = speeds["results"]
    host = last_json("bench/scheduler.py", "--requests", "256", "--contexts", "1024")
    return {"one_request": one["out_tok_s"], "eight_requests": eight["out_tok_s"],
            "prompt": round(PROMPT / prompt["prompts_s"], 1), "start_up": speeds["start_s"],
            "host_step_256": host["us_per_step"]["256x1024"]}


def last_json(*command: str) -> Any:
    """The last line that a Python command prints, which is JSON."""
    run = subprocess.run([sys.executable, *command], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
                         stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


def commit() -> str:
    """The commit's short hash, with `-dirty` if tracked files were changed since."""
    run = subprocess.run(["git", "describe", "--always", "--dirty", "--exclude=*"], cwd=ROOT, stdout=subprocess.PIPE,
                         text=True)
    return run.stdout.strip()


def track(now: dict[str, float], machine: str, file: Path, *, accept: bool = False) -> int:
    """Compare the figures with the last accepted ones of the machine, add them to the file, return the exit status."""
    lines = file.read_text().splitlines() if file.exists() else []
    before = last_accepted(lines, machine)
    found = worse(now, before["figures"]) if before else []
    run = {"commit": commit(), "date": time.strftime("%Y-%m-%d %H:%M"), "machine": machine,
           "is_accepted": accept or not found, "figures": now}
    with file.open("a") as out:
        print(json.dumps(run), file=out)
    for figure in FIGURES:
        print(f"{figure.name:16}{now[figure.name]:10g} {figure.unit}")
    print(f"compared with {before['commit']} of {before['date']}" if before else "the first figures of this machine")
    for line in found:
        print(f"worse: {line}")
    return int(bool(found) and not accept)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accept", action="store_true", help="compare later runs with these figures")
    args = parser.parse_args()
    return track(measure(), f"{cpu_name()}, {os.cpu_count()} cores", FILE, accept=args.accept)


if __name__ == "__main__":
    sys.exit(main())
