"""Stands for `vllm.v1.engine.async_llm`: exports AsyncLLM."""

from outrider import AsyncLLM

__all__ = ["AsyncLLM"]
