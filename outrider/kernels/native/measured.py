"""Remembers what was measured about the native kernels, in a file beside their library.

A library is built anew for other sources, compilers and processors, and then everything is measured again.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from outrider.kernels.native.build import library


def remembered(name: str, measure: Callable[[], bool]) -> bool:
    """The answer that was measured before, or is measured now. Where no file can be written, every start measures."""
    path = Path(library()._name).with_suffix(".json")
    known = _read(path)
    if not isinstance(known.get(name), bool):
        known[name] = measure()
        _write(path, known)
    return known[name]


def _read(path: Path) -> dict[str, bool]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(path: Path, known: dict[str, bool]) -> None:
    """Writes beside the file and renames, so that another process reads all of it or nothing."""
    try:
        handle, name = tempfile.mkstemp(suffix=".json", dir=path.parent)
        with os.fdopen(handle, "w") as file:
            json.dump(known, file)
        os.replace(name, path)
    except OSError:
        return
