"""Facts about a node: versions, code, model and settings. Node 0 compares them with its own before anything is loaded.
No torch.

If ranks had different code or weights, results would be wrong without any error."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from outrider.config import EngineConfig
from outrider.core.fields import shown
from outrider.core.file_digests import bytes_digest, value_digest
from outrider.models.sources.model_source import ModelSource

PACKAGE = Path(__file__).parents[2]
SUFFIXES = (".py", ".c", ".h")
PACKAGES = ("outrider", "torch", "triton")
# Settings of one machine: where its files are, and which node it is.
OWN_SETTINGS = ("model", "tokenizer", "download_dir", "node_rank", "master_addr", "profiler_dir")
OWN_SUFFIX = "_file"  # of further settings of this kind
SAMPLES, SAMPLE_BYTES = 64, 4096  # that are read of a file of weights, evenly spaced
DIGITS = 16  # of a digest in a message


@dataclass(frozen=True)
class NodeFacts:
    """The facts about a node, as plain values that can be sent as JSON."""

    node: int
    versions: dict[str, str]
    settings: dict[str, Any]  # of node 0 all; of another node those that it was given

    @classmethod
    def of_this_node(cls, config: EngineConfig) -> NodeFacts:
        found = {name: _version_of(name) for name in PACKAGES}
        found |= {"outrider's code": code_digest(), "python": ".".join(platform.python_version_tuple()[:2])}
        return cls(config.node_rank, found, settings_of(config) if config.node_rank == 0 else given_settings(config))

    def to_json(self) -> bytes:
        return json.dumps(vars(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> NodeFacts:
        """Read facts from JSON. Raises ValueError for anything that `to_json` does not write."""
        try:
            given = json.loads(data)
            own = cls(**given)
        except (TypeError, RecursionError) as error:
            raise ValueError(f"it sent a wrong description of itself: {error}") from None
        kinds = {"node": int, "versions": dict, "settings": dict}
        if any(type(given[name]) is not kind for name, kind in kinds.items()):
            raise ValueError("it sent a wrong description of itself")
        return own


def differences(here: NodeFacts, there: NodeFacts) -> list[str]:
    """Describe each fact in which another node differs from node 0, with both values."""
    found = [f"{name} is {shown(here.versions.get(name))} on node 0 and {shown(there.versions.get(name))} on node "
             f"{there.node}" for name in here.versions | there.versions
             if here.versions.get(name) != there.versions.get(name)]
    for name, theirs in there.settings.items():
        if name not in here.settings or here.settings[name] != theirs:
            found.append(f"{name} is {shown(here.settings.get(name))} on node 0 and {shown(theirs)} on node "
                         f"{there.node}")
    return found


def settings_of(config: EngineConfig) -> dict[str, Any]:
    """Return the settings that must be the same on every node, in the form of JSON."""
    given = {own.name: getattr(config, own.name) for own in fields(config) if not _is_own(own.name)}
    return json.loads(json.dumps(given, default=_name_of))


def given_settings(config: EngineConfig) -> dict[str, Any]:
    """Return the settings that are not at their defaults. A node takes the others from node 0."""
    defaults = settings_of(EngineConfig(config.model))
    return {name: value for name, value in settings_of(config).items() if value != defaults[name]}


def with_own_settings(config: EngineConfig, own: EngineConfig) -> EngineConfig:
    """Return node 0's settings, with those that belong to this machine replaced by its own."""
    return replace(config, **{one.name: getattr(own, one.name) for one in fields(own) if _is_own(one.name)})


def _is_own(setting: str) -> bool:
    return setting in OWN_SETTINGS or setting.endswith(OWN_SUFFIX)


@cache
def code_digest() -> str:
    files = sorted(path for path in PACKAGE.rglob("*") if path.suffix in SUFFIXES)
    return _short({path.relative_to(PACKAGE).as_posix(): bytes_digest(path.read_bytes()) for path in files})


def model_digest(config: EngineConfig, source: ModelSource) -> str:
    """Return a digest of the config and of samples of every weight file, also of drafters' files. Reading whole files
    would take as long as loading them."""
    folders = [source.path] if config.load_format != "dummy" else []
    drafts = config.speculative_config
    given = drafts.get("model") if isinstance(drafts, dict) else None
    folders += [Path(name) for name in (given if isinstance(given, list) else [given]) if isinstance(name, str)]
    samples = [{path.name: _sampled(path) for path in _weight_files(folder)} for folder in folders]
    return _short([source.config, source.eos_token_ids, samples])


def _weight_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted(own for own in path.glob("*") if own.suffix in (".safetensors", ".gguf"))


def _sampled(path: Path) -> str:
    size, found = path.stat().st_size, sha256()
    found.update(str(size).encode())
    with open(path, "rb") as file:
        for number in range(SAMPLES):
            file.seek(max(0, size - SAMPLE_BYTES) * number // (SAMPLES - 1))
            found.update(file.read(SAMPLE_BYTES))
    return found.hexdigest()


def _short(value: Any) -> str:
    return value_digest(value)[:DIGITS]


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _name_of(value: Any) -> str:
    if isinstance(value, Mapping):
        return str(dict(value))
    return f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', repr(value))}"
