"""ModelOutline: a model and its drafter on the meta device, for one choice of quantization. It computes how many bytes
an engine with this model would hold."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from outrider import drafters
from outrider.cache.groups import CacheLayout
from outrider.config import EngineConfig
from outrider.core import Limits
from outrider.drafters.base import Drafter
from outrider.feature_list import worker_features
from outrider.fitting.room import DeviceRoom
from outrider.fitting.step_estimate import META, estimate_step, tensor_bytes, widest_of
from outrider.formats import DenseLinear, UnsummedRanks
from outrider.formats.scaled import ScaledExperts, ScaledLinear
from outrider.formats.weight_format import WeightFormat
from outrider.kernels import cpu as native
from outrider.kernels import ops
from outrider.layers.base import FormatModule, LayeredModule, find_modules
from outrider.models.base import Model
from outrider.models.sources.model_source import ModelSource
from outrider.runner.cache_plan import check_cache_types, plan_cache
from outrider.runner.check import table_bytes
from outrider.runner.memory import FeatureBytes, StepMemory
from outrider.runner.preparation import draft_build
from outrider.runner.target import outline_target
from outrider.runner.worker_ranks import ONE_RANK

log = logging.getLogger("outrider")
CODES_COPIED = 1.15  # bytes of a copy of codes, for each byte of the codes
SIXTEEN_BIT_FILES = ("bfloat16", "float16")


@contextmanager
def _quiet() -> Iterator[None]:
    """A context that hides log lines below errors. Outlines are built for several forms, and each would log the same
    lines."""
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


@dataclass(frozen=True)
class ModelOutline:
    config: EngineConfig
    device: torch.device
    capability: tuple[int, int] | None
    model: Model
    drafter: Drafter | None
    files_dtype: str  # of weights in the files, for packed copies
    layouts: dict[str, CacheLayout]  # that were planned, by types of the cache and drafters

    @classmethod
    def build(cls, config: EngineConfig, source: ModelSource, room: DeviceRoom,
              layouts: dict[str, CacheLayout]) -> ModelOutline:
        """Build the outline. Raises ValueError if the model cannot be quantised like this on the device. layouts: cache
        layouts that were planned so far, which all outlines share."""
        group = ONE_RANK.group if config.tensor_parallel_size == 1 else UnsummedRanks(0, config.tensor_parallel_size)
        with _quiet(), ops.planning_for(room.planned_capability):
            model = outline_target(config, source, room.device, group)
            model.weights()  # formats allocate their weights when they are first asked for them
            named = source.config.get("dtype") or source.config.get("torch_dtype")
            return cls(config, room.device, room.capability, model, _drafter(config, model),
                       str(named).removeprefix("torch."), layouts)

    def layout(self, config: EngineConfig) -> CacheLayout:
        """Return the layout of the cache. Raises ValueError if a layer, or the device, does not support the config's KV
        cache dtype."""
        key = f"{config.kv_cache_dtype} {config.speculative_config}"
        if key not in self.layouts:
            check_cache_types(config, self.model, self.device, self.capability)
            self.layouts[key] = plan_cache(config, self.model, self.drafter,
                                           whole_parts=config.attention_backend == "flex")
        return self.layouts[key]

    @cached_property
    def widest(self) -> int:
        return widest_of(self.model, self.modules)

    @property
    def is_on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def modules(self) -> list[LayeredModule]:
        """The drafter's modules."""
        return [] if self.drafter is None else self.drafter.modules()

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of the weights of the model and its drafter. Rope tables and other tables of positions are not
        included."""
        drafter = 0 if self.drafter is None else self.drafter.weight_bytes()
        return sum(slot.nbytes for slot in self.model.weights().values()) + drafter

    def packed_bytes(self, config: EngineConfig) -> int:
        """Bytes of the second copies of weights that a CPU makes for steps of a few tokens."""
        return self._packed_bytes if config.packed_weights else 0

    @cached_property
    def _packed_bytes(self) -> int:
        """Bytes of the packed copies, if the config allows them. They are 16-bit if the files are."""
        if self.is_on_gpu or self.model.dtype != torch.float32 or not native.available():
            return 0
        products = [own for own in find_modules([self.model, *self.modules], FormatModule) if own.is_product]
        return sum(self._copy_bytes(own.format) for own in products)

    def _copy_bytes(self, held: WeightFormat[Any]) -> int:
        """Return the most bytes that the packed copy of one weight takes. The copy is 16-bit if the files are; the copy
        of a quantised weight has a scale for every 32 numbers."""
        if isinstance(held, DenseLinear):
            return held.weight_bytes // (2 if self.files_dtype in SIXTEEN_BIT_FILES else 1)
        return int(CODES_COPIED * held.weight_bytes) if isinstance(held, ScaledLinear | ScaledExperts) else 0

    @cached_property
    def other_bytes(self) -> int:
        """Bytes of the model's tensors that do not come from its files. Tables of positions hardly count, because they
        have one position in an outline."""
        return max(0, tensor_bytes([self.model]) - sum(slot.nbytes for slot in self.model.weights().values()))

    @cached_property
    def _table_bytes(self) -> int:
        return table_bytes(self.model)

    def held_bytes(self, config: EngineConfig, limits: Limits) -> int:
        """Return the bytes that the model holds before its first step: weights, packed copies, tables and other
        tensors."""
        tables = self._table_bytes * limits.max_len
        return self.weight_bytes + self.packed_bytes(config) + self.other_bytes + tables

    def limits(self, config: EngineConfig, gpu_bytes: int | None) -> Limits:
        speculative = config.speculative
        most = 0 if speculative is None else speculative.num_speculative_tokens
        limits = config.limits(gpu_bytes=gpu_bytes, max_positions=self.model.max_positions,
                               vocab_size=self.model.vocab_size, max_drafts=most)
        limits = replace(limits, hidden_size=self.model.hidden_size)
        for feature in worker_features(config, self.model):
            limits = feature.limit(limits, self.model, self.drafter)
        return limits

    def feature_bytes(self, config: EngineConfig, limits: Limits) -> dict[str, FeatureBytes]:
        return {feature.name: feature.num_bytes(limits, self.model) for feature in worker_features(config, self.model)}

    def step_memory(self, config: EngineConfig, limits: Limits) -> StepMemory:
        return estimate_step(self.model, self.widest, self.layout(config), limits, self.feature_bytes(config, limits),
                             on_gpu=self.is_on_gpu, has_graphs=self.is_on_gpu and not config.enforce_eager)


def _drafter(config: EngineConfig, model: Model) -> Drafter | None:
    speculative = config.speculative
    if speculative is None:
        return None
    limits = config.limits(gpu_bytes=None, max_positions=model.max_positions, vocab_size=model.vocab_size,
                           max_drafts=speculative.num_speculative_tokens)
    build = replace(draft_build(config, model, replace(limits, max_len=1)), device=META)
    return drafters.make_drafter(speculative, build)
