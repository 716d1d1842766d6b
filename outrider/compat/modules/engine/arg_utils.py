"""Stands for `vllm.engine.arg_utils`: exports AsyncEngineArgs and EngineArgs."""

from outrider import AsyncEngineArgs, EngineArgs

__all__ = ["AsyncEngineArgs", "EngineArgs"]
