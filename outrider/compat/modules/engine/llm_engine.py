"""Stands for `vllm.engine.llm_engine`: exports LLMEngine."""

from outrider import LLMEngine

__all__ = ["LLMEngine"]
