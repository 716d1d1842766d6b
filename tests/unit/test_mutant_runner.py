"""The mutant runner itself: it kills, it sees survivors, broken mutants and an empty folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import outrider

RUNNER = Path(__file__).parents[1] / "mutants" / "run.py"
TARGET = "tests/unit/test_mutant_runner.py::test_the_version_is_not_empty"


def test_the_version_is_not_empty() -> None:
    # Also what the mutants below break.
    assert outrider.__version__


def _run(folder: Path, **mutants: str) -> tuple[int, str]:
    for name, statement in mutants.items():
        body = f"import outrider\nNAME = {name!r}\nTESTS = [{TARGET!r}]\n\n\ndef apply():\n    {statement}\n"
        (folder / f"{name}.py").write_text(body)
    done = subprocess.run([sys.executable, str(RUNNER), str(folder)], capture_output=True, text=True)
    return done.returncode, done.stdout


@pytest.mark.skipif("OUTRIDER_MUTANT" in os.environ, reason="runs the runner")
class TestRunner:
    def test_a_mutant_whose_tests_fail_is_killed(self, tmp_path: Path) -> None:
        code, out = _run(tmp_path, breaks="outrider.__version__ = ''")
        assert code == 0 and "1 of 1 mutants killed" in out, out

    def test_a_survivor_and_a_mutant_that_cannot_run_are_failures(self, tmp_path: Path) -> None:
        code, out = _run(tmp_path, idle="pass", broken="raise RuntimeError('no such rule')")
        assert code == 1 and "survived" in out and "could not run" in out and "0 of 2" in out, out

    def test_a_patch_that_takes_other_arguments_proves_nothing(self, tmp_path: Path) -> None:
        body = f"NAME = 'stale'\nTESTS = [{TARGET!r}]\n\n\ndef apply():\n    def patch(only): ...\n    patch(1, 2)\n"
        (tmp_path / "stale.py").write_text(body.replace("patch(1, 2)", "import outrider\n    del outrider.__version__\n"
                                                        "    outrider.__getattr__ = lambda _: patch(1, 2)"))
        code, out = _run(tmp_path)
        assert code == 1 and "its patch does not fit what it replaces" in out and "0 of 1" in out, out

    def test_a_mutant_whose_tests_fail_without_it_proves_nothing(self, tmp_path: Path) -> None:
        (tmp_path / "test_red.py").write_text("def test_red():\n    assert False\n")
        (tmp_path / "mutants").mkdir()
        body = f"NAME = 'red'\nTESTS = ['{tmp_path / 'test_red.py'}']\n\n\ndef apply():\n    pass\n"
        (tmp_path / "mutants" / "red.py").write_text(body)
        code, out = _run(tmp_path / "mutants")
        assert code == 1 and "do not pass without it" in out and "0 of 1" in out, out

    def test_no_mutants_is_a_failure(self, tmp_path: Path) -> None:
        code, out = _run(tmp_path)
        assert code == 1 and "no mutants" in out
