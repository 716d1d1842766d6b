"""The output folder of a training run: checks of its content and of the disk's free space, and writing of files.

The trained drafter lies in the folder itself; `training/` below it keeps the texts, the settings and the checkpoint
that a resumed run goes on from.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from outrider.training.settings import changed_settings

GIB = 1 << 30
MODEL_FILES = "model_files"  # key in the noted settings: the digest of the target's files
NUM_SAMPLES, SAMPLE_BYTES = 16, 4096  # of a file's bytes, spread evenly


@dataclass(frozen=True)
class Workspace:
    folder: Path

    @property
    def inner(self) -> Path:
        return self.folder / "training"

    @property
    def checkpoint(self) -> Path:
        return self.inner / "checkpoint.safetensors"

    @property
    def _settings(self) -> Path:
        return self.inner / "settings.json"

    def check_empty(self, *, resume: bool) -> None:
        """Raise ValueError if the output folder is not empty, unless this run resumes the run in it."""
        existing = self._nearest_existing()
        if not existing.is_dir():
            raise ValueError(f"--out: {existing} is not a folder: name one")
        names = {path.name for path in self.folder.iterdir()} if self.folder.exists() else set()
        if self._settings.exists():
            if not resume:
                raise ValueError(f"--out: {self.folder} is not empty: --resume goes on with it; to begin anew, name "
                                 "another folder")
        elif names - {self.inner.name} or (names and not resume):  # a killed run may leave an empty inner folder
            reason = "is not empty, and holds no run that could be resumed" if resume else "is not empty"
            raise ValueError(f"--out: {self.folder} {reason}: name another folder")

    def check_room(self, needed: int, what: str) -> None:
        """Raise ValueError if the disk has less than `needed` free bytes. what: the name of the data, for the
        message."""
        existing = self._nearest_existing()
        free = shutil.disk_usage(existing).free
        if free < needed:
            raise ValueError(f"--out: {needed / GIB:.2f} GiB are needed for {what}, and {existing} has "
                             f"{free / GIB:.2f} GiB free: free some, or name a folder on another disk")

    def _nearest_existing(self) -> Path:
        """The folder itself, or the first of its parents that exists."""
        return next(path for path in (self.folder, *self.folder.absolute().parents) if path.exists())

    def open(self, settings: dict[str, Any]) -> None:
        """Make the folders and record the settings. A resumed run must have the recorded ones."""
        self.inner.mkdir(parents=True, exist_ok=True)
        if not self._settings.exists():
            write_text(self._settings, json.dumps(settings, indent=2) + "\n")
            return
        try:
            before = dict(json.loads(self._settings.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ValueError(f"--resume: {self._settings} does not hold the settings of a run ({error}): name another "
                             "folder to begin anew") from None
        before.setdefault(MODEL_FILES, settings.get(MODEL_FILES))  # older runs noted the target's name alone
        changed = changed_settings(before, settings)
        if changed == [MODEL_FILES]:
            raise ValueError(f"--resume: the run in {self.folder} was begun with another model under the name "
                             f"{settings.get('model')}: its config or weights have changed since; name another folder "
                             "to begin anew")
        if changed:
            listed = ", ".join(f"{name} was {before.get(name)!r} and is {settings.get(name)!r}" for name in changed)
            raise ValueError(f"--resume: the run in {self.folder} has other settings: {listed}. Give the same "
                             "settings, or name another folder")


def digest_model(path: Path) -> str:
    """A digest of a model's config and weights, given its folder or file, from the files' sizes and a few of their
    bytes: weights that were trained further differ nearly everywhere."""
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.name == "config.json"
                                                 or file.suffix in (".safetensors", ".gguf"))
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{size};".encode())
        with open(file, "rb") as opened:
            for index in range(NUM_SAMPLES):
                opened.seek(index * max(0, size - SAMPLE_BYTES) // (NUM_SAMPLES - 1))
                digest.update(opened.read(SAMPLE_BYTES))
    return digest.hexdigest()


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file atomically: under another name first, then renamed. A killed process leaves the old file. Raises
    OSError with the file's name if it cannot be written."""
    other = path.with_name(path.name + ".part")
    try:
        other.touch()
        mode = other.stat().st_mode  # safetensors would write a file that its owner alone can read
        write(other)
        other.chmod(mode)
        with open(other, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(other, path)
    except (OSError, SafetensorError) as error:
        raise OSError(f"{path} cannot be written: {error}; once there is room, --resume goes on from what is "
                      "there") from error
    finally:
        other.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    replace_file(path, lambda other: other.write_text(text, encoding="utf-8"))
