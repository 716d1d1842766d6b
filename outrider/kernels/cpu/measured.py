"""Keeps measurements of the native kernels in a file beside their library.

Other sources, compilers and processors have another library, so everything is measured again for them.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from outrider.kernels.cpu.build import library

MOST_REMEMBERED = 64  # entries of the file; the oldest are forgotten


def remembered(name: str, measure: Callable[[], bool]) -> bool:
    """Return whether `measure` returns True on this machine. The result is kept in a file and read at later starts. If
    no file can be written, every start measures."""
    known = recall(name)
    if not isinstance(known, bool):
        known = measure()
        remember(name, known)
    return known


def recall(name: str) -> Any:
    """Return the JSON value that was stored under this name; None if there is none."""
    return _read(_path()).get(name)


def remember(name: str, value: Any) -> None:
    known = {other: held for other, held in _read(_path()).items() if other != name}
    _write(_path(), dict([*known.items(), (name, value)][-MOST_REMEMBERED:]))


def _path() -> Path:
    return Path(library()._name).with_suffix(".json")


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(path: Path, known: dict[str, Any]) -> None:
    """Write a temporary file and rename it, so that another process reads the whole file or none."""
    try:
        handle, name = tempfile.mkstemp(suffix=".json", dir=path.parent)
        with os.fdopen(handle, "w") as file:
            json.dump(known, file)
        os.replace(name, path)
    except OSError:
        return
