"""Every command that the README prints runs as printed: the quick ones here, all of them from an installed wheel in the
long tests."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from outrider.cli import build_parser
from outrider.commands.parser import check_flags
from tests.compat.readme import PORT, Place, commands, install, programs, request, run_all

QUICK = ("outrider env", "outrider generate", "outrider chat")


def own_commands() -> list[str]:
    return [command for command in commands() if command.startswith("outrider")]


def test_the_readme_shows_each_command() -> None:
    shown = {command.split()[1] for command in own_commands()}
    assert shown >= {"chat", "generate", "serve", "verify", "bench", "env"} and programs()


def test_its_request_to_the_server_is_one() -> None:
    words = request()
    assert f":{PORT}/v1/" in words[1] and set(json.loads(words[-1])) == {"model", "messages", "max_tokens"}


@pytest.mark.parametrize("command", own_commands())
def test_its_flags_are_understood(command: str) -> None:
    import shlex

    args = build_parser().parse(shlex.split(command)[1:])
    check_flags(args)


@pytest.mark.parametrize("command", [command for command in own_commands() if command.startswith(QUICK)])
def test_quick_commands_run_as_printed(command: str, tmp_path: Path) -> None:
    ran = Place(Path(sys.executable).parent, tmp_path).run(command, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip()


@pytest.mark.long
def test_everything_runs_from_a_wheel_in_an_empty_environment(tmp_path: Path,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    run_all(install(tmp_path))
