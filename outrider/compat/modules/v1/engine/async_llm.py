"""outrider.v1.engine.async_llm: the place of AsyncLLM in vLLM."""

from outrider import AsyncLLM

__all__ = ["AsyncLLM"]
