"""Outrider: exact speculative decoding for every shape of open-weight model.

Importing the package is cheap; torch is imported on first use of `LLM`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.params import SamplingParams

if TYPE_CHECKING:
    from outrider.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> object:
    if name == "LLM":
        from outrider.llm import LLM

        return LLM
    raise AttributeError(f"module 'outrider' has no attribute {name!r}")
