"""Reads an image file that a user names and makes a data URL of it, the form in which messages have images."""

from __future__ import annotations

import base64
from pathlib import Path

from outrider.feature_list import feature_object

KINDS = {b"\x89PNG": "png", b"\xff\xd8": "jpeg", b"GIF8": "gif", b"RIFF": "webp", b"BM": "bmp"}  # by first bytes


def image_url(path: str) -> str:
    """Return the data URL of an image file. The kind is read from the file's first bytes; the pixels are not
    checked."""
    file = Path(path.strip().strip("'\"")).expanduser()
    if not file.is_file():
        raise ValueError(f"there is no file {file}: correct the path")
    feature_object("images", "outrider.features.images.limits:DEFAULT_LIMITS").check_bytes(file.stat().st_size)
    data = file.read_bytes()
    kind = next((kind for begin, kind in KINDS.items() if data.startswith(begin)), None)
    if kind is None:
        raise ValueError(f"{file} is not an image of these formats: {', '.join(KINDS.values())}. Convert it")
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
