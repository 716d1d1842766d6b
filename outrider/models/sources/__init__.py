"""Sources of models: a local folder in Hugging Face's format, a GGUF file, a hub id, or the default `smollm2`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from outrider.core.fields import did_you_mean
from outrider.models.sources.folder import folder_source
from outrider.models.sources.model_source import VISION_PART, ModelSource, SourceError
from outrider.models.sources.smollm2 import smollm2_file

__all__ = ["DEFAULT_MODEL", "ModelSource", "SourceError", "folder_source", "gguf_source", "resolve", "tokenizer_files"]

DEFAULT_MODEL = "smollm2"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def resolve(model: str | Path, revision: str | None = None, weights: bool = True,
            download_dir: str | None = None) -> ModelSource:
    """Find a model's files, and fetch them if they are not on this machine. `weights=False` fetches no weights from the
    hub. `download_dir`: the folder for files of the hub."""
    path = Path(model).expanduser()
    if path.is_dir():
        return _local_folder(path)
    if path.is_file():
        return _with_vision(gguf_source(path))
    name = str(model)
    if name == DEFAULT_MODEL:
        return gguf_source(smollm2_file(), name=DEFAULT_MODEL)
    if name.endswith(".gguf") or name.startswith((".", "/", "~")):
        raise SourceError(f"there is no file or folder {name}: correct the path")
    if not HUB_ID.fullmatch(name):
        hint = did_you_mean(name, [DEFAULT_MODEL])
        what = f"neither a local path, nor a hub id (owner/name), nor {DEFAULT_MODEL!r}"
        raise SourceError(f"{name!r}{hint} It is {what}" if hint else f"{name!r} is {what}")
    from outrider.models.sources.hub import hub_folder  # importing the hub's library takes half a second

    return folder_source(hub_folder(name, revision, weights, download_dir), name=name)


def tokenizer_files(name: str, revision: str | None = None, download_dir: str | None = None) -> Path | dict[str, Any]:
    """Find the files of a tokenizer that is given separately from the model. name: a folder, which may contain no
    model, or a model's name."""
    path = Path(name).expanduser()
    return path if path.is_dir() else resolve(name, revision, False, download_dir).tokenizer()


def _local_folder(path: Path) -> ModelSource:
    """Return the source of a local folder. If the folder has no config.json and a single GGUF file, this file is the
    source."""
    if not (path / "config.json").exists():
        files = sorted(file for file in path.glob("*.gguf") if VISION_PART not in file.name.lower())
        if len(files) == 1:
            return _with_vision(gguf_source(files[0]))
        if files:
            raise SourceError(f"{path} holds several GGUF files. Give the path of one: "
                              f"{', '.join(f.name for f in files)}")
        raise SourceError(f"{path} is not a model: it holds neither config.json nor a .gguf file. Give another")
    return folder_source(path)


def _with_vision(source: ModelSource) -> ModelSource:
    """Join a GGUF file with the vision part beside it, if there is one."""
    if not any(VISION_PART in path.name.lower() for path in source.path.parent.glob("*.gguf")):
        return source
    from outrider.models.sources.gguf_seeing import with_projector

    return with_projector(source)  # type: ignore[arg-type]


def gguf_source(path: Path, name: str | None = None, *, maps_file: bool = True) -> ModelSource:
    from outrider.models.sources import gguf  # the gguf library is needed for GGUF files alone

    return gguf.gguf_source(path, name, maps_file=maps_file)
