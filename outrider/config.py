"""EngineConfig: every setting of an engine, frozen. The only place where defaults and "auto" are decided.

What a caller leaves as None is decided here from what is known of the model and the device. Nothing changes later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outrider.core import Limits

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
LOAD_FORMATS = ("auto", "dummy")
BACKENDS = ("auto", "torch", "cpu", "triton")
LOGPROBS_MODES = ("raw", "processed")
CPU_CACHE_BYTES = 4 << 30  # at most this much for the pool on the CPU
CPU_CACHE_SHARE = 0.25  # of the memory that is free


@dataclass(frozen=True)
class EngineConfig:
    model: str
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None  # the model's own, lowered to what the pool can hold
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    page_size: int = 16  # smallest page, in tokens
    num_pages: int | None = None  # instead of a size in bytes
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    overlap: bool = True  # schedule the next step before the last one's result is read
    seed: int = 0
    load_format: str = "auto"
    attention_backend: str = "auto"
    logprobs_mode: str = "raw"
    max_logprobs: int = 20
    pad_requests: tuple[int, ...] = ()  # batches are padded up to the next of these sizes
    pad_tokens: tuple[int, ...] = ()
    speculative_config: dict[str, Any] | None = None
    packed_weights: bool = True  # CPU: a second copy of the weights, laid out for a few token rows

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("device", self.device.split(":")[0], DEVICES)
        _one_of("load_format", self.load_format, LOAD_FORMATS)
        _one_of("attention_backend", self.attention_backend, BACKENDS)
        _one_of("logprobs_mode", self.logprobs_mode, LOGPROBS_MODES)
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_pages", "kv_cache_memory_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}")
        if self.num_pages is not None and self.kv_cache_memory_bytes is not None:
            raise ValueError("num_pages and kv_cache_memory_bytes say the same thing: give one of them")

    @property
    def steps_in_flight(self) -> int:
        return 2 if self.overlap else 1

    def limits(self, *, on_cuda: bool, max_positions: int, vocab_size: int, max_drafts: int) -> Limits:
        """Sizes for this model and device; max_len may still be lowered to what the pool can hold."""
        max_len = self.max_model_len or max_positions
        if max_len > max_positions:
            raise ValueError(f"max_model_len ({max_len}) exceeds the {max_positions} positions the model was made for")
        max_requests = self.max_num_seqs or (256 if on_cuda else 32)
        tokens = self.max_num_batched_tokens or max(8192 if on_cuda else 512, max_requests * (1 + max_drafts))
        return Limits(max_requests, tokens, max_len, max_drafts, vocab_size, steps_in_flight=self.steps_in_flight)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
