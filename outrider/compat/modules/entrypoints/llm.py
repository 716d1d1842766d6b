"""outrider.entrypoints.llm: the place of LLM in vLLM."""

from outrider import LLM

__all__ = ["LLM"]
