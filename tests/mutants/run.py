"""Breaks each rule on purpose and demands that its tests notice.

A mutant is a file in this folder with `NAME`, `TESTS` (pytest arguments) and `apply()`, which monkeypatches
outrider. Its tests must pass without it and fail with it; the package itself knows nothing of mutants.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PASSED, FAILED = 0, 1  # pytest's exit codes; a collection or usage error is neither
TIMEOUT = 300.0
PARALLEL = 2


@dataclass(frozen=True)
class Mutant:
    path: Path
    name: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Verdict:
    mutant: Mutant
    killed: bool
    why: str
    seconds: float
    output: str = ""


def find(folder: Path) -> list[Mutant]:
    files = sorted(p for p in folder.glob("*.py") if p.name not in ("run.py", "__init__.py"))
    return [read(path) for path in files]


def read(path: Path) -> Mutant:
    """NAME and TESTS are read without running the file: applying belongs in the process that is broken by it."""
    tree = ast.parse(path.read_text(), filename=str(path))
    values: dict[str, object] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            if node.targets[0].id in ("NAME", "TESTS"):
                values[node.targets[0].id] = ast.literal_eval(node.value)
    has_apply = any(isinstance(node, ast.FunctionDef) and node.name == "apply" for node in tree.body)
    name, tests = values.get("NAME"), values.get("TESTS")
    if not isinstance(name, str) or not isinstance(tests, (list, tuple)) or not tests or not has_apply:
        raise SystemExit(f"{path}: a mutant defines NAME = '...', TESTS = ['...'] (literals) and def apply()")
    return Mutant(path, name, tuple(str(t) for t in tests))


def run_pytest(tests: tuple[str, ...], mutant: Path | None) -> tuple[int | None, str]:
    """pytest's exit code (None: it ran too long) and its output."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("OUTRIDER_MUTANT", "PYTEST_"))}
    if mutant is not None:
        env["OUTRIDER_MUTANT"] = str(mutant)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
    try:
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return None, f"no end after {TIMEOUT:.0f} s"
    return done.returncode, done.stdout + done.stderr


def judge(mutant: Mutant, baseline: tuple[int | None, str]) -> Verdict:
    start = time.monotonic()
    code, output = baseline
    if code != PASSED:
        return Verdict(mutant, False, f"its tests do not pass without it (pytest gave {code})", 0.0, output)
    code, output = run_pytest(mutant.tests, mutant.path)
    seconds = time.monotonic() - start
    if code == FAILED:
        return Verdict(mutant, True, summary(output), seconds)
    if code == PASSED:
        return Verdict(mutant, False, "survived: its tests pass", seconds, output)
    if code is None:
        return Verdict(mutant, False, "its tests did not end", seconds, output)
    return Verdict(mutant, False, f"its tests could not run (pytest gave {code})", seconds, output)


def summary(output: str) -> str:
    """pytest's own last line, such as `2 failed, 1 passed in 0.3s`."""
    lines = [line for line in output.splitlines() if " failed" in line or " error" in line]
    return lines[-1].strip("= ") if lines else "failed"


def main(folder: Path) -> int:
    mutants = find(folder)
    if not mutants:
        print(f"no mutants in {folder}")
        return 1
    with ThreadPoolExecutor(PARALLEL) as pool:
        selections = sorted({m.tests for m in mutants})
        baselines = dict(zip(selections, pool.map(lambda tests: run_pytest(tests, None), selections), strict=True))
        verdicts = list(pool.map(lambda m: judge(m, baselines[m.tests]), mutants))
    width = max(len(m.name) for m in mutants)
    for v in verdicts:
        print(f"{'killed' if v.killed else 'FAILED':8}{v.mutant.name:{width}}  {v.seconds:6.1f} s  {v.why}")
    for v in verdicts:
        if not v.killed:
            print(f"\n--- {v.mutant.name} ({v.mutant.path.name}): {v.why}\n{v.output[-3000:]}")
    num_killed = sum(v.killed for v in verdicts)
    print(f"{num_killed} of {len(verdicts)} mutants killed")
    return 0 if num_killed == len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent))
