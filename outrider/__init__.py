"""Outrider: exact speculative decoding for every shape of open-weight model.

Importing the package is cheap; torch is imported on first use of `LLM` or `AsyncLLM`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.core.params import SamplingParams

if TYPE_CHECKING:
    from outrider.engine.async_llm import AsyncLLM
    from outrider.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> object:
    if name == "LLM":
        from outrider.llm import LLM

        return LLM
    if name == "AsyncLLM":
        from outrider.engine.async_llm import AsyncLLM

        return AsyncLLM
    raise AttributeError(f"module 'outrider' has no attribute {name!r}")
