"""outrider.v1.engine.llm_engine: the place of LLMEngine in vLLM."""

from outrider import LLMEngine

__all__ = ["LLMEngine"]
