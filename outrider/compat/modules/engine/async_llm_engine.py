"""outrider.engine.async_llm_engine: the place of AsyncLLMEngine in vLLM."""

from outrider import AsyncLLMEngine

__all__ = ["AsyncLLMEngine"]
