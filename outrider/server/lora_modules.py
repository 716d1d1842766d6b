"""Checks the names and folders of LoRA adapters that the operator or a client wants to serve.

The operator names adapters at start (`--lora-modules`). Clients of a server with --admin may load further adapters, but
only from folders below `--lora-root`: a client's path is resolved, links included, before anything is read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.core.fields import shown
from outrider.lora_request import CONFIG, TENSORS, LoRARequest

NAMED = 'write name=folder, or a JSON object as {"name": "sql", "path": "adapters/sql"}'


@dataclass(frozen=True)
class NamedAdapter:
    name: str
    path: str
    base: str | None = None  # the name of the model that it changes, in /v1/models; None: the one that is served

    @property
    def request(self) -> LoRARequest:
        return LoRARequest(self.name, 1, self.path)


def read_modules(given: Sequence[str]) -> dict[str, NamedAdapter]:
    """Read the adapters of --lora-modules, by name. A folder that is not an adapter is refused."""
    named: dict[str, NamedAdapter] = {}
    for text in given:
        own = _read_json(text) if text.lstrip().startswith("{") else _read_pair(text)
        if own.name in named:
            raise ValueError(f"lora_modules: {own.name!r} is given twice: choose another name for one of the two")
        if not (Path(own.path) / CONFIG).is_file():
            raise ValueError(f"lora_modules: {own.path} is no adapter, because it holds no {CONFIG}: name the folder "
                             "of a LoRA saved by PEFT")
        named[own.name] = own
    return named


def _read_pair(text: str) -> NamedAdapter:
    name, separator, path = text.partition("=")
    if not separator or not name.strip() or not path.strip():
        raise ValueError(f"lora_modules: {shown(text)}: {NAMED}")
    return NamedAdapter(name.strip(), path.strip())


def _read_json(text: str) -> NamedAdapter:
    try:
        given: Any = json.loads(text)
    except ValueError as error:
        raise ValueError(f"lora_modules: {shown(text)} is not valid JSON ({error}): {NAMED}") from None
    keys = {"name", "path", "base_model_name"}
    is_right = {"name", "path"} <= given.keys() <= keys
    if not is_right or not all(isinstance(value, str) and value.strip() for value in given.values()):
        raise ValueError(f"lora_modules: {shown(text)} must have name and path, and may have base_model_name: {NAMED}")
    return NamedAdapter(given["name"], given["path"], given.get("base_model_name"))


def path_below(root: str, path: str) -> str:
    """Resolve a client's path. Refuse it if it is not below the root folder, or if links in the adapter's files lead
    out of it."""
    base = Path(root).resolve()
    try:
        found = (base / path).resolve()
        files = [(found / name).resolve() for name in (CONFIG, TENSORS)]
    except (OSError, ValueError, RuntimeError):  # a loop of links, a null byte
        raise ValueError(f"lora_path {shown(path)} must be a folder below the server's --lora-root") from None
    if found == base or not all(each.is_relative_to(base) for each in (found, *files)) or not found.is_dir():
        raise ValueError(f"lora_path {shown(path)} must be a folder below the server's --lora-root")
    return str(found)
