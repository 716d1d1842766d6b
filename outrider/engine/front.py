"""Front, the base of LLM and AsyncLLM: how they are made from arguments, and answers for names that only vLLM has."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Self

from outrider.config import EngineArgs
from outrider.core.vllm_settings import NO_ADAPTERS, NO_HEADS

# Methods of vLLM's fronts that are not there, with what to do instead.
NOT_SERVED = {
    "classify": NO_HEADS,
    "reward": NO_HEADS,
    "add_lora": NO_ADAPTERS,
    "collective_rpc": "one engine uses one device",
    "reset_prefix_cache": "use skip_reading_prefix_cache of SamplingParams, or a cache_salt of the prompt",
    "sleep": "close the engine and start another",
    "start_profile": "run it under a profiler",
    "wake_up": "close the engine and start another",
}


class Front:
    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        return cls(**asdict(engine_args))

    if not TYPE_CHECKING:  # a checker knows which methods there are

        def __getattr__(self, name: str) -> Any:
            front = type(self).__name__
            if name in NOT_SERVED:
                raise AttributeError(f"{front}.{name} is not supported: {NOT_SERVED[name]}")
            raise AttributeError(f"{front} has no {name!r}")


def refuse_adapter(lora_request: object) -> None:
    if lora_request is not None:
        raise ValueError(f"lora_request is not supported: {NO_ADAPTERS}")
