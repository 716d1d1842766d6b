"""SamplingParams: what a caller may ask of one request. Names follow vLLM where they mean the same.

A field is implemented or refused by name; none is silently ignored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

MAX_LOGPROBS_ALL = -1  # logprobs=-1: the whole vocabulary

# Fields of vLLM's SamplingParams that Outrider does not have, with what to do instead.
REFUSED_FIELDS = {
    "best_of": "use n",
    "beam_width": "beam search is not supported",
    "use_beam_search": "beam search is not supported",
    "length_penalty": "beam search is not supported",
    "early_stopping": "beam search is not supported",
    "logits_processors": "use logit_bias, bad_words or allowed_token_ids",
    "structured_outputs": "grammars are not supported yet",
    "guided_decoding": "grammars are not supported yet",
    "truncate_prompt_tokens": "truncate the prompt yourself",
    "extra_args": "there are no extra arguments",
    "output_kind": "use LLM.stream for partial outputs",
    "flat_logprobs": "logprobs are lists of dicts",
    "repetition_detection": "use repetition_penalty or stop",
    "thinking_token_budget": "use max_tokens",
    "spaces_between_special_tokens": "special tokens are joined as the tokenizer joins them",
    "include_reasoning": "reasoning is not parsed here",
    "routed_experts_prompt_start": "expert routing is not returned",
    "skip_clone": "parameters are immutable here",
}


@dataclass(frozen=True)
class SamplingParams:
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logit_bias: dict[int, float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    skip_reading_prefix_cache: bool | None = None
    speculative: bool | int | None = None  # False: no drafts; a number: at most so many
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()  # filled from bad_words by the engine

    def __new__(cls, *args: Any, **fields: Any) -> SamplingParams:
        # Before the generated __init__, which could only say "unexpected keyword".
        for name in fields:
            if name in REFUSED_FIELDS:
                raise ValueError(f"SamplingParams: {name} is not supported: {REFUSED_FIELDS[name]}")
            if name not in cls.__dataclass_fields__:
                known = ", ".join(sorted(cls.__dataclass_fields__))
                raise ValueError(f"SamplingParams: unknown field {name!r}; known are {known}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self._check_ranges()
        self._check_combinations()

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @cached_property
    def is_plain(self) -> bool:
        """Asks for nothing but a draw at its temperature: logits are neither edited, filtered nor reported."""
        filters = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
        edits = self.logit_bias or self.bad_words or self.bad_words_token_ids or self.allowed_token_ids
        reports = self.logprobs is not None or self.prompt_logprobs is not None
        return not (edits or self.has_penalties or self.min_tokens or reports or (filters and not self.is_greedy))

    @property
    def max_drafts(self) -> int | None:
        """The request's own ceiling on drafts: None leaves it to the engine."""
        if self.speculative is None or self.speculative is True:
            return None
        return int(self.speculative)

    def _check_ranges(self) -> None:
        def need(ok: bool, name: str, allowed: str) -> None:
            if not ok:
                raise ValueError(f"SamplingParams: {name} must be {allowed}, got {getattr(self, name)!r}")

        def finite(name: str) -> bool:
            return isinstance(getattr(self, name), (int, float)) and math.isfinite(getattr(self, name))

        need(_is_int(self.n) and self.n >= 1, "n", "an integer of at least 1")
        need(finite("temperature") and self.temperature >= 0, "temperature", "a finite number of at least 0")
        need(finite("top_p") and 0 < self.top_p <= 1, "top_p", "in (0, 1]")
        need(_is_int(self.top_k) and self.top_k >= -1, "top_k", "an integer of at least -1 (0 or -1: all)")
        need(finite("min_p") and 0 <= self.min_p <= 1, "min_p", "in [0, 1]")
        for name in ("presence_penalty", "frequency_penalty"):
            need(finite(name) and -2 <= getattr(self, name) <= 2, name, "in [-2, 2]")
        need(finite("repetition_penalty") and self.repetition_penalty > 0, "repetition_penalty", "greater than 0")
        need(self.seed is None or (_is_int(self.seed) and abs(self.seed) < 2**63), "seed", "a 64-bit integer or None")
        need(self.max_tokens is None or (_is_int(self.max_tokens) and self.max_tokens >= 1),
             "max_tokens", "an integer of at least 1, or None")
        need(_is_int(self.min_tokens) and self.min_tokens >= 0, "min_tokens", "an integer of at least 0")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            need(value is None or (_is_int(value) and value >= MAX_LOGPROBS_ALL), name,
                 "an integer of at least 0, -1 for all, or None")
        if self.speculative is not None and not isinstance(self.speculative, bool):
            need(_is_int(self.speculative) and self.speculative >= 0, "speculative", "a bool or a number of drafts")
        for token, bias in (self.logit_bias or {}).items():
            need(_is_int(token) and token >= 0, "logit_bias", "keyed by token ids")
            need(isinstance(bias, (int, float)) and -100 <= bias <= 100, "logit_bias", "of values in [-100, 100]")
        need(all(isinstance(s, str) and s for s in self.stop_strings), "stop", "non-empty strings")
        need(all(_is_int(t) and t >= 0 for t in self.stop_token_ids or ()), "stop_token_ids", "token ids")
        need(all(isinstance(w, str) and w for w in self.bad_words or ()), "bad_words", "non-empty strings")
        need(self.allowed_token_ids is None or bool(self.allowed_token_ids), "allowed_token_ids", "None or not empty")
        need(all(_is_int(t) and t >= 0 for t in self.allowed_token_ids or ()), "allowed_token_ids", "token ids")

    def _check_combinations(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"SamplingParams: min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})"
            )
        if self.stop_strings and not self.detokenize:
            raise ValueError("SamplingParams: stop strings need detokenize=True")
        if self.is_greedy and self.n > 1:
            raise ValueError("SamplingParams: n > 1 with temperature 0 gives n equal samples; set temperature or n=1")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
