"""Breaks each rule on purpose and demands that its tests notice.

A mutant is a file in this folder with `NAME`, `TESTS` (pytest arguments) and `apply()`, which monkeypatches
outrider. Its tests must pass without it and fail with it; the package itself knows nothing of mutants.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PASSED, FAILED = 0, 1  # pytest's exit codes; a collection or usage error is neither
TIMEOUT = 900.0
PARALLEL = 2
# A patch that is called with other arguments breaks the package, whatever the rule, so that any test fails.
MISFIT = re.compile(r"TypeError: apply\.<locals>\.\w+\(\) (takes|got|missing) .*")


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


class Run(NamedTuple):
    """pytest's exit code (None: it ran too long), its output and how long it took."""

    code: int | None
    output: str
    seconds: float


def run_pytest(tests: tuple[str, ...], mutant: Path | None) -> Run:
    """The first failure ends it: one is enough to know."""
    start = time.monotonic()
    env = {k: v for k, v in os.environ.items() if not k.startswith(("OUTRIDER_MUTANT", "PYTEST_"))}
    if mutant is not None:
        env["OUTRIDER_MUTANT"] = str(mutant)
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
    try:
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return Run(None, f"no end after {TIMEOUT:.0f} s", TIMEOUT)
    return Run(done.returncode, done.stdout + done.stderr, time.monotonic() - start)


def judge(mutant: Mutant, without: Run, broken: Run) -> Verdict:
    """From runs of its tests without it and with it."""
    code, output, seconds = broken
    if without.code != PASSED:
        why = f"its tests do not pass without it (pytest gave {without.code})"
        return Verdict(mutant, False, why, seconds, without.output)
    if code == FAILED and (misfit := MISFIT.search(output)):
        return Verdict(mutant, False, f"its patch does not fit what it replaces ({misfit[0]})", seconds, output)
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


def merged(selections: Iterable[tuple[str, ...]]) -> dict[tuple[str, ...], tuple[str, ...]]:
    """For each selection the tests to run in its place without a mutant. Selections without options share one run,
    because to start a process and to import torch takes longer than most of the tests."""
    selections = list(selections)
    plain = [tests for tests in selections if not any(test.startswith("-") for test in tests)]
    together = tuple(sorted({test for tests in plain for test in tests}))
    return {tests: together if tests in plain else tests for tests in selections}


def main(folder: Path) -> int:
    mutants = find(folder)
    if not mutants:
        print(f"no mutants in {folder}")
        return 1
    with ThreadPoolExecutor(PARALLEL) as pool:
        in_its_place = merged(mutant.tests for mutant in mutants)
        without = {tests: pool.submit(run_pytest, tests, None) for tests in sorted(set(in_its_place.values()))}
        broken = [pool.submit(run_pytest, mutant.tests, mutant.path) for mutant in mutants]
        verdicts = [judge(mutant, without[in_its_place[mutant.tests]].result(), run.result())
                    for mutant, run in zip(mutants, broken, strict=True)]
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
