"""SHA-256 digests of files, and of values as JSON in one canonical form. No torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def canonical(value: Any) -> bytes:
    """Return the canonical bytes of a JSON value: sorted keys, no spaces, ASCII, and 1.0 written as 1, as some JSON
    writers do. Raises ValueError or TypeError for a value that JSON does not have."""
    return json.dumps(_whole(value), sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def canonical_object(fields: Mapping[str, Any], written: Mapping[str, bytes]) -> bytes:
    """Return the canonical bytes of a JSON object. `written`: the canonical bytes of those field values that the caller
    has already."""
    parts = (canonical(name) + b":" + (written[name] if name in written else canonical(fields[name]))
             for name in sorted(fields))
    return b"{" + b",".join(parts) + b"}"


def _whole(value: Any) -> Any:
    match value:
        case float() if value.is_integer():
            return int(value)
        case dict():
            return {name: _whole(own) for name, own in value.items()}
        case list() | tuple():
            return [_whole(own) for own in value]
    return value


def value_digest(value: Any) -> str:
    return bytes_digest(canonical(value))


def bytes_digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def file_digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
