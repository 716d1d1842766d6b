"""Every command that the README prints runs as printed: the quick ones here, all of them and those of docs/ from an
installed wheel in the long tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.compat.doc_blocks import all_blocks
from tests.compat.doc_commands import main, programs
from tests.compat.packages import build_wheel
from tests.compat.place import Place

COMMANDS = [command for block in all_blocks() if block.page == "README.md" for command in block.commands]
QUICK = ("outrider env", "outrider models", "outrider generate", "outrider chat")


def test_the_readme_shows_each_command() -> None:
    shown = {command.split()[1] for command in COMMANDS if command.startswith("outrider")}
    assert shown >= {"chat", "serve", "verify", "bench", "models"} and programs()


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith(QUICK)])
def test_quick_commands_run_as_printed(command: str, tmp_path: Path) -> None:
    ran = Place(Path(sys.executable).parent, tmp_path).run(command, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip()


@pytest.mark.long
def test_everything_runs_from_a_wheel_in_an_empty_environment(tmp_path: Path,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    build_wheel(tmp_path / "dist")
    assert main(tmp_path / "dist", tmp_path, []) == 0
