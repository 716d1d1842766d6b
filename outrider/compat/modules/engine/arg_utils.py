"""outrider.engine.arg_utils: the place of AsyncEngineArgs and EngineArgs in vLLM."""

from outrider import AsyncEngineArgs, EngineArgs

__all__ = ["AsyncEngineArgs", "EngineArgs"]
