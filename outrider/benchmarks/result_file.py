"""The file that a benchmark writes its result to."""

from __future__ import annotations

from pathlib import Path

from outrider.commands.parser import UsageError


def check_result_file(name: str | None, flag: str = "--save-result") -> None:
    """Refuse a file that cannot be written, before anything is measured."""
    if name is None:
        return
    folder = Path(name).resolve().parent
    if not folder.is_dir():
        raise UsageError(f"{flag}: there is no folder {folder}")
    if Path(name).is_dir():
        raise UsageError(f"{flag}: {name} is a folder")
