"""Digests of everything that a model's results depend on: weight files, config, tokenizer, and the sources of this
package. No torch.

The digest of a file is cached under the file's path, size, time and inode, so that gigabytes are hashed once.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from outrider import __version__
from outrider.core.file_digests import file_digest, value_digest
from outrider.engine.text import Tokenizer
from outrider.models.sources import ModelSource
from outrider.models.sources.smollm2 import cache_folder

PACKAGE = Path(__file__).parents[1]
# Folders of the package whose code decides the bits of a token.
SOURCES = ("formats", "kernels", "layers", "mixers", "models", "sample")
SUFFIXES = (".py", ".c", ".h")
THREADS = 4
MOST_KEPT = 4096  # digests in the file; the oldest are forgotten
_hashing = threading.Lock()  # callers that need the same digests wait for the first one


@dataclass(frozen=True)
class ModelDigests:
    name: str
    weights: str  # of the files, as they are stored
    config: str  # of the values that the engine reads, hf_overrides included, and of the ids that end a text
    tokenizer: str | None


def digest_model(source: ModelSource, tokenizer: Tokenizer | None, loaded_at: float) -> ModelDigests:
    """Compute digests of a model's files. This may read all of them. loaded_at: the time at which the engine read the
    files."""
    with _hashing:
        files = _weight_files(source.path)
        changed = next((path.name for path in files if path.stat().st_mtime > loaded_at), None)
        if changed is not None:
            raise ValueError(f"{changed} has changed since the engine read it, so its digest would be that of "
                             "other weights: start the engine again")
        weights = value_digest({path.name: own for path, own in zip(files, _file_digests(files), strict=True)})
    config = value_digest([source.config, source.eos_token_ids])
    return ModelDigests(source.name, weights, config, None if tokenizer is None else _tokenizer_digest(tokenizer))


def _weight_files(path: Path) -> list[Path]:
    """Return the files from which the model's weights are read, in the order of their names."""
    if path.is_file():
        return [path]
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    return [path / name for name in sorted(set(shards))]


def _tokenizer_digest(tokenizer: Tokenizer) -> str:
    return value_digest(tokenizer.backend.to_str())


def _file_digests(paths: Sequence[Path]) -> list[str]:
    """The SHA-256 of each file, from the cache if the file has not changed since."""
    kept = _read_kept()
    names = {path: str(path.resolve()) for path in paths}
    identities = {path: _identity(path) for path in paths}
    fresh = [path for path in paths if kept.get(names[path], [None])[:-1] != identities[path]]
    if fresh:
        with ThreadPoolExecutor(THREADS) as pool:  # hashing leaves Python's lock to others
            found = list(pool.map(file_digest, fresh))
        new = {names[path]: [*identities[path], own] for path, own in zip(fresh, found, strict=True)}
        kept = {name: own for name, own in kept.items() if name not in new} | new
        _write_kept(dict(list(kept.items())[-MOST_KEPT:]))
    return [kept[names[path]][-1] for path in paths]


def _identity(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ino]


def _kept_file() -> Path:
    return cache_folder() / "digests.json"


def _read_kept() -> dict[str, list[Any]]:
    try:
        found = json.loads(_kept_file().read_text())
    except (OSError, ValueError):
        return {}
    is_whole = isinstance(found, dict) and all(isinstance(own, list) and len(own) == 4 for own in found.values())
    return found if is_whole else {}


def _write_kept(kept: dict[str, list[Any]]) -> None:
    """Store digests in the cache, by writing a temporary file and renaming it. If the folder cannot be written, files
    are hashed at every start."""
    path = _kept_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(suffix=".json", dir=path.parent)
        with os.fdopen(handle, "w") as file:
            json.dump(kept, file)
        os.replace(name, path)
    except OSError:
        return


def describe_kernels(device_name: str) -> dict[str, str | None]:
    """Describe what determines the rounding of results: the versions of this package and of torch, the device, and a
    digest of the sources."""
    on_cpu = device_name.startswith("CPU")
    return {"outrider": __version__, "torch": _version_of("torch"),
            "triton": None if on_cpu else _version_of("triton"),
            "device": f"CPU, {_cpu_name()}" if on_cpu else device_name, "sources": _sources_digest()}


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def _sources_digest() -> str:
    files = sorted(path for folder in SOURCES for path in (PACKAGE / folder).rglob("*") if path.suffix in SUFFIXES)
    return value_digest({path.relative_to(PACKAGE).as_posix(): file_digest(path) for path in files})


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    named = dict(line.split(":", 1) for line in reversed(lines) if line.startswith(("model name", "CPU part")))
    return " ".join([platform.machine(), *(value.strip() for value in named.values())])
