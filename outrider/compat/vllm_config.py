"""VllmConfig: an engine's settings in vLLM's groups, for reading. No torch.

Sizes come from the settings, or from the running engine (`limits`). An unknown name raises an error that lists the
known ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from outrider.config import EngineConfig
from outrider.core import Limits
from outrider.engine.load import find_model

TWO_LABELS = 2  # transformers' number of classes of a config that says nothing of them


@dataclass(frozen=True)
class SettingsGroup:
    """A group of settings that can be read but not changed."""

    if not TYPE_CHECKING:  # a checker knows which fields there are

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            known = ", ".join(own.name for own in fields(self))
            raise AttributeError(f"{type(self).__name__} has no {name!r} in outrider; it has {known}")


@dataclass(frozen=True)
class ModelConfig(SettingsGroup):
    model: str
    tokenizer: str
    dtype: str
    max_model_len: int | None
    revision: str | None
    seed: int
    enforce_eager: bool
    max_logprobs: int
    logprobs_mode: str
    vocab_size: int | None  # None before the engine runs
    quantization: None = None
    trust_remote_code: bool = False
    runner_type: str = "generate"
    is_multimodal_model: bool = False
    engine_config: EngineConfig | None = field(default=None, repr=False)

    @cached_property
    def hf_config(self) -> SimpleNamespace:
        """The values of config.json, changed by hf_overrides."""
        assert self.engine_config is not None
        values = find_model(self.engine_config).config
        return SimpleNamespace(**values | _labels_of(values))

    @property
    def hf_text_config(self) -> SimpleNamespace:
        """The section of config.json that describes the language model."""
        values = vars(self.hf_config).get("text_config")
        return self.hf_config if values is None else SimpleNamespace(**values)

    def get_vocab_size(self) -> int:
        if self.vocab_size is None:
            raise ValueError("the vocabulary's size is read with the model: use llm.llm_engine.model_config")
        return self.vocab_size


def _labels_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the names of classes in the three forms that transformers' configs have. If the config has no names, they
    are made up."""
    given = {int(index): name for index, name in (values.get("id2label") or {}).items()}
    names = given or {index: f"LABEL_{index}" for index in range(values.get("num_labels") or TWO_LABELS)}
    return {"id2label": names, "num_labels": len(names),
            "label2id": values.get("label2id") or {name: index for index, name in names.items()}}


@dataclass(frozen=True)
class CacheConfig(SettingsGroup):
    block_size: int
    gpu_memory_utilization: float
    cache_dtype: str
    enable_prefix_caching: bool
    num_gpu_blocks: int | None
    num_gpu_blocks_override: int | None
    kv_cache_memory_bytes: int | None


@dataclass(frozen=True)
class SchedulerConfig(SettingsGroup):
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    max_model_len: int | None
    async_scheduling: bool
    enable_chunked_prefill: bool = True
    policy: str = "priority"


@dataclass(frozen=True)
class ParallelConfig(SettingsGroup):
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    world_size: int = 1


@dataclass(frozen=True)
class DeviceConfig(SettingsGroup):
    device: str


@dataclass(frozen=True)
class LoadConfig(SettingsGroup):
    load_format: str
    download_dir: str | None


@dataclass(frozen=True)
class VllmConfig(SettingsGroup):
    model_config: ModelConfig
    cache_config: CacheConfig
    scheduler_config: SchedulerConfig
    parallel_config: ParallelConfig
    device_config: DeviceConfig
    load_config: LoadConfig
    speculative_config: Any  # an outrider.config.SpeculativeConfig, or None
    lora_config: None = None
    kv_transfer_config: None = None

    @classmethod
    def from_engine_config(cls, config: EngineConfig, limits: Limits | None = None,
                           num_pages: int | None = None) -> VllmConfig:
        """Group the settings of an engine. `limits`, `num_pages`: those of the running engine, if there is one."""
        max_len = config.max_model_len if limits is None else limits.max_len
        max_requests = config.max_num_seqs if limits is None else limits.max_requests
        max_tokens = config.max_num_batched_tokens if limits is None else limits.max_batched_tokens
        model = ModelConfig(
            config.model, config.tokenizer or config.model, config.dtype, max_len, config.revision, config.seed,
            config.enforce_eager, config.max_logprobs, config.logprobs_mode,
            vocab_size=None if limits is None else limits.vocab_size, engine_config=config)
        cache = CacheConfig(
            config.page_size, config.gpu_memory_utilization, config.kv_cache_dtype, config.enable_prefix_caching,
            num_pages or config.num_pages, config.num_pages, config.kv_cache_memory_bytes)
        steps = SchedulerConfig(max_requests, max_tokens, max_len,
                                config.overlap is not False if limits is None else limits.steps_in_flight > 1)
        num_ranks = config.tensor_parallel_size
        return cls(model, cache, steps, ParallelConfig(num_ranks, world_size=num_ranks), DeviceConfig(config.device),
                   LoadConfig(config.load_format, config.download_dir), config.speculative)
