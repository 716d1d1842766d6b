"""Config classes of vLLM that scripts create and pass to an engine. `outrider.config` finds them here. No torch."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from outrider.compat.pooler_config import PoolerConfig
from outrider.compat.profiler_config import ProfilerConfig
from outrider.compat.settings import NO_IMAGES, ONE_DEVICE, ONE_GRAMMAR_LIBRARY

VIEWS = ("CacheConfig", "DeviceConfig", "LoadConfig", "ModelConfig", "ParallelConfig", "SchedulerConfig", "VllmConfig")
# Classes that are not here, with what to use instead.
NOT_HERE = {
    "AttentionConfig": "choose a backend with attention_backend",
    "DecodingConfig": ONE_GRAMMAR_LIBRARY,
    "KVTransferConfig": "one engine keeps its own cache: leave kv_transfer_config out",
    "LoRAConfig": "give enable_lora, max_loras and max_lora_rank themselves",
    "MultiModalConfig": NO_IMAGES,
    "ObservabilityConfig": "the server has /metrics and --otlp-traces-endpoint",
    "StructuredOutputsConfig": ONE_GRAMMAR_LIBRARY,
    "WeightTransferConfig": f"{ONE_DEVICE}; LLM.update_weights replaces weights",
}


class CompilationConfig:
    """vLLM's settings of compilation. Any are accepted, and none has an effect: steps are captured unless enforce_eager
    is set."""

    def __init__(self, level: object = None, **settings: Any) -> None:
        self.__dict__.update({"level": level} | settings)

    def __repr__(self) -> str:
        return f"CompilationConfig({', '.join(f'{name}={value!r}' for name, value in self.__dict__.items())})"


MADE = {"CompilationConfig": CompilationConfig, "PoolerConfig": PoolerConfig, "ProfilerConfig": ProfilerConfig}


def find_config(name: str) -> object:
    """Return a class of vLLM's module `config` by its name."""
    if name in VIEWS:
        return getattr(import_module("outrider.compat.vllm_config"), name)
    if name in MADE:
        return MADE[name]
    if name in NOT_HERE:
        raise ImportError(f"outrider.config.{name} is not supported: {NOT_HERE[name]}")
    raise AttributeError(f"module 'outrider.config' has no attribute {name!r}")
