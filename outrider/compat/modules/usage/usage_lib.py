"""Stands for `vllm.usage.usage_lib`: the names of vLLM's entry points. No usage statistics are collected here."""

from enum import StrEnum

__all__ = ["UsageContext"]


class UsageContext(StrEnum):
    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"
