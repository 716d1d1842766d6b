"""Stands for `vllm.engine.async_llm_engine`: exports AsyncLLMEngine."""

from outrider import AsyncLLMEngine

__all__ = ["AsyncLLMEngine"]
