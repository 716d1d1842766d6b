"""Checks the files that a command will write at its end, before it measures or simulates anything."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryFile

from outrider.commands.parser import UsageError


def check_result_file(name: str | None, flag: str = "--save-result") -> None:
    """Refuse a file that cannot be written."""
    if name is None:
        return
    folder = Path(name).resolve().parent
    if not folder.is_dir():
        raise UsageError(f"{flag}: there is no folder {folder}: make it first, or name another")
    if Path(name).is_dir():
        raise UsageError(f"{flag}: {name} is a folder: name a file")


def check_plot(name: str | None) -> None:
    """Refuse --plot if matplotlib is missing or the file cannot be written."""
    if name is None:
        return
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError("--plot needs matplotlib: pip install 'outrider[plot]'") from error
    folder = Path(name).resolve().parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(f"--plot: no file can be written in {folder} ({error.strerror}); name another") from error
