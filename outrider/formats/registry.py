"""The table from kinds of stored weights to the formats that keep them. `register_format` adds one from outside."""

from __future__ import annotations

from outrider.formats.base import KeptFormat
from outrider.formats.gguf import GgufLinear
from outrider.kernels.quantized import KINDS

_FORMATS: dict[str, type[KeptFormat]] = dict.fromkeys(KINDS, GgufLinear)


def register_format(kind: str, format_class: type[KeptFormat]) -> None:
    """Keep stored weights of this kind in this format from now on."""
    _FORMATS[kind] = format_class


def format_for(kind: str) -> type[KeptFormat] | None:
    """The format that keeps weights of this kind; None if they are dequantised while they are loaded."""
    return _FORMATS.get(kind)
