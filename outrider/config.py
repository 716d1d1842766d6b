"""EngineConfig: every setting of an engine, frozen. The only place where defaults and "auto" are decided.

What a caller leaves as None is decided here from what is known of the model and the device. Nothing changes later.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.core import Limits

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
LOAD_FORMATS = ("auto", "dummy")
BACKENDS = ["auto", "torch", "native", "cpu", "triton"]  # `cpu` is native; registering a backend adds its name
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
    checkpoint_interval: int = 1024  # tokens between the states of recurrent layers that are kept for prefix hits
    overlap: bool | None = None  # schedule the next step before the last one's result is read
    seed: int = 0
    load_format: str = "auto"
    attention_backend: str = "auto"
    enforce_eager: bool = False  # CUDA: no graphs
    logprobs_mode: str = "raw"
    max_logprobs: int = 20
    pad_requests: tuple[int, ...] = ()  # batches are padded up to the next of these sizes
    pad_tokens: tuple[int, ...] = ()
    speculative_config: dict[str, Any] | None = None
    packed_weights: bool = True  # CPU: a second copy of the weights, laid out for a few token rows
    keep_quantized: bool = True  # CPU, float32: weights stay in a GGUF file's own bits, with the same results

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
        if self.checkpoint_interval < max(1, self.page_size):
            raise ValueError(f"checkpoint_interval must be at least page_size ({self.page_size} tokens), got "
                             f"{self.checkpoint_interval}: states are kept where pages end")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}")
        if self.num_pages is not None and self.kv_cache_memory_bytes is not None:
            raise ValueError("num_pages and kv_cache_memory_bytes say the same thing: give one of them")

    @property
    def speculative(self) -> SpeculativeConfig | None:
        return None if self.speculative_config is None else SpeculativeConfig.parse(self.speculative_config)

    def steps_in_flight(self, on_cuda: bool) -> int:
        """Two by default. With drafts on the CPU one: there a result costs nothing to wait for, and tells how many
        drafts there are to check."""
        overlap = self.overlap
        if overlap is None:
            overlap = on_cuda or self.speculative_config is None
        return 2 if overlap else 1

    def limits(self, *, on_cuda: bool, max_positions: int, vocab_size: int, max_drafts: int) -> Limits:
        """Sizes for this model and device; max_len may still be lowered to what the pool can hold."""
        max_len = self.max_model_len or max_positions
        if max_len > max_positions:
            raise ValueError(f"max_model_len ({max_len}) exceeds the {max_positions} positions the model was made for")
        max_requests = self.max_num_seqs or (256 if on_cuda else 32)
        tokens = self.max_num_batched_tokens or max(8192 if on_cuda else 512, max_requests * (1 + max_drafts))
        return Limits(max_requests, tokens, max_len, max_drafts, vocab_size,
                      steps_in_flight=self.steps_in_flight(on_cuda))


def config_for(front: str, model: str, settings: dict[str, Any]) -> EngineConfig:
    """The config of a front such as LLM, from its keyword arguments."""
    known = EngineConfig.__dataclass_fields__
    for name in settings:
        if name not in known:
            raise ValueError(f"{front}: unknown setting {name!r}; known are {', '.join(sorted(known))}")
    return EngineConfig(model=str(model), **settings)


def _one_of(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


METHODS = ("ngram", "suffix", "draft_model", "eagle", "eagle3", "mtp", "gemma4_assistant")
NEEDS_MODEL = ("draft_model", "eagle", "eagle3", "gemma4_assistant")
ASSISTANT_POSITIONS = ("sampled", "computed")  # the token whose position a Gemma 4 assistant drafts from: the last ...
SYNTHETIC_RATE = 0.6914  # the same at every position: 3 drafts give a mean run of 2.5


@dataclass(frozen=True)
class SpeculativeConfig:
    """`speculative_config` with vLLM's keys. `num_speculative_tokens` is a ceiling unless auto is False."""

    methods: tuple[str, ...]
    num_speculative_tokens: int
    model: str | None = None
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    auto: bool = True
    synthetic_rates: tuple[float, ...] | None = None
    assistant_position: str = "sampled"

    @classmethod
    def parse(cls, given: dict[str, Any]) -> SpeculativeConfig:
        fields = dict(given)
        known = ["method", "model", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max", "auto",
                 "rejection_sample_method", "synthetic_acceptance_length", "synthetic_rates",
                 "assistant_position"]
        for key in fields:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"speculative_config: unknown key {key!r}{hint} Known are {', '.join(known)}")
        methods = _methods(fields)
        k = fields.get("num_speculative_tokens")
        if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= 16:
            raise ValueError(f"speculative_config: num_speculative_tokens must be an integer from 1 to 16, got {k!r}")
        model = fields.get("model")
        if model is None and any(method in NEEDS_MODEL for method in methods):
            raise ValueError(f"speculative_config: method {methods} needs 'model', the folder or id of the drafter")
        low, high = fields.get("prompt_lookup_min", 2), fields.get("prompt_lookup_max", 4)
        if not 1 <= low <= high:
            raise ValueError(f"speculative_config: prompt_lookup_min ({low}) must be 1 to prompt_lookup_max ({high})")
        position = fields.get("assistant_position", "sampled")
        _one_of("speculative_config: assistant_position", position, ASSISTANT_POSITIONS)
        return cls(methods, k, model, low, high, bool(fields.get("auto", True)), _synthetic_rates(fields), position)


def _methods(fields: dict[str, Any]) -> tuple[str, ...]:
    method = fields.get("method")
    methods = tuple(method) if isinstance(method, (list, tuple)) else (method,)
    for name in methods:
        if not isinstance(name, str) or (name not in METHODS and ":" not in name):
            raise ValueError(
                f"speculative_config: unknown method {name!r}; known are {', '.join(METHODS)}, or "
                "'package.module:Class' for a drafter of your own"
            )
    return methods


def _synthetic_rates(fields: dict[str, Any]) -> tuple[float, ...] | None:
    method = fields.get("rejection_sample_method")
    if method not in (None, "synthetic"):
        raise ValueError(f"speculative_config: rejection_sample_method must be 'synthetic' or left out, got {method!r}")
    rates, length = fields.get("synthetic_rates"), fields.get("synthetic_acceptance_length")
    if rates is not None and length is not None:
        raise ValueError("speculative_config: synthetic_rates and synthetic_acceptance_length say the same thing")
    if rates is not None:
        return tuple(float(rate) for rate in rates)
    if length is not None:  # vLLM's pattern: whole drafts first, then a part of one; 2.5 is 1, 0.5, 0
        k = fields["num_speculative_tokens"]
        if not 1 <= length <= 1 + k:
            raise ValueError(f"speculative_config: synthetic_acceptance_length must be in 1 to {1 + k}, got {length}")
        return tuple(min(1.0, max(0.0, length - 1 - j)) for j in range(k))
    return (SYNTHETIC_RATE,) if method == "synthetic" else None
