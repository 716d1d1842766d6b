"""Text of others in logs, and standard error that takes nothing."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.core.drafter_faults import FaultKind, FaultRecord, words_of
from outrider.core.foreign_text import on_one_line, printable
from outrider.core.status_line import say, status_line, write_stderr

FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="a device of Linux that is always full")


def test_control_characters_are_written_out() -> None:
    assert printable("a\tb\nc \x1b[31m\r\x9b\x00\u202e\u2028é漢") == "a\tb\nc \\x1b[31m\\r\\x9b\\x00\\u202e\\u2028é漢"
    assert on_one_line("a \n\n  b\r\nc") == "a b c" and on_one_line("a\r") == "a\\r"


def test_a_drafters_exception_is_one_harmless_line(caplog: pytest.LogCaptureFixture,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("outrider"), "propagate", True)
    error = RuntimeError("\x1b[2Jbroken\noutrider: error: the server was sold\x07")
    assert words_of(error) == r"RuntimeError: \x1b[2Jbroken outrider: error: the server was sold\x07"
    assert len(words_of(RuntimeError("\n" * 10_000))) < 400

    class Own:
        name = "own\x1b[31m\n"

    FaultRecord.for_drafter(Own()).add(FaultKind.RAISED, words_of(error), trace=f"RuntimeError: {error}")
    assert "own" in caplog.text and not {"\x1b", "\x07"} & set(caplog.text)


@needs_full
def test_what_standard_error_does_not_take_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in (open(FULL, "w"), None, open(os.devnull)):
        monkeypatch.setattr(sys, "stderr", stream)
        say("a line")
        write_stderr("another")
        with status_line("a wait", is_once=True):
            pass


@needs_full
@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&-", "2>&1 >/dev/null | true"])
def test_a_command_ends_with_its_own_status(redirection: str) -> None:
    command = f"set -o pipefail; '{sys.executable}' -m outrider generate /no/such/model --prompt x {redirection}"
    ran = subprocess.run(["bash", "-c", command], capture_output=True)
    assert (ran.returncode, ran.stdout) == (2, b"")
