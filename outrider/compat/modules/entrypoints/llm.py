"""Stands for `vllm.entrypoints.llm`: exports LLM."""

from outrider import LLM

__all__ = ["LLM"]
