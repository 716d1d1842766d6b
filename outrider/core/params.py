"""SamplingParams: the settings of one request. A field that vLLM has too has vLLM's name.

A field is implemented or refused by name; none is silently ignored."""

from __future__ import annotations

import copy
import enum
import hashlib
from dataclasses import InitVar, dataclass, fields, replace
from functools import cached_property
from typing import Annotated, Any, TypeAlias

from outrider.core.fields import (
    INT32,
    INT64,
    Count,
    Finite,
    NotEmpty,
    OneOf,
    Range,
    Text,
    TokenId,
    check_fields,
    check_names,
    shown,
)
from outrider.core.structured import StructuredOutputsParams

MAX_LOGPROBS_ALL = -1  # logprobs=-1: the whole vocabulary
MAX_SAMPLES = 128  # most samples of one prompt
MAX_KEPT_IDS = 2048  # of one place of a sampling mask
TIES = 8  # tokens beyond top_k that are looked at, because all that tie with the last one are kept
MAX_BIAS = 1e9  # a larger bias decides as much, and stays finite when it is divided by a temperature
Bias: TypeAlias = Annotated[float, Finite("-1e9 forbids a token, 1e9 forces it")]
Seed: TypeAlias = Annotated[int, Range(-INT64, INT64)]
Priority: TypeAlias = Annotated[int, Range(-INT32, INT32)]  # requests with smaller numbers come first

# Fields of vLLM's SamplingParams that Outrider does not have, with what to do instead.
REFUSED_FIELDS = {
    "best_of": "use n",
    "beam_width": "use LLM.beam_search",
    "use_beam_search": "use LLM.beam_search",
    "length_penalty": "use LLM.beam_search",
    "early_stopping": "use LLM.beam_search",
    "logits_processors": "give the engine logits_processors=[Class], and its parameters as extra_args; or use "
                         "logit_bias, bad_words or allowed_token_ids",
    "truncate_prompt_tokens": "truncate the prompt yourself",
    "flat_logprobs": "logprobs are lists of dicts",
    "repetition_detection": "use repetition_penalty or stop",
    "thinking_token_budget": "use max_tokens",
    "spaces_between_special_tokens": "special tokens are joined as the tokenizer joins them",
    "include_reasoning": "reasoning is not parsed here",
    "logprob_token_ids": "use logprobs=-1, and choose",
    "routed_experts_prompt_start": "routed_experts are those of the whole prompt",
    "prompt_logprob_token_ids": "use prompt_logprobs=-1, and choose",
    "prompt_logprob_start": "prompt_logprobs are those of the whole prompt",
    "stream_interval": "a stream gets every token that its reader has not seen",
    "trace_decode_token_ids": "tokens are those of the model: give known tokens as part of the prompt",
    "watermarking": "texts get no watermark",
    "skip_clone": "the engine always keeps a copy of its own",
}


# Parameters that can forbid every token, and others that always leave some. A bias is bounded: it forbids none.
FORBID_ALL = ("allowed_token_ids", "bad_words")
FORBID_SOME = ("structured_outputs", "min_tokens")
NO_TOKEN = ("the model's logits are not finite, or no token is allowed: check the weights, logit_bias, "
            "allowed_token_ids and structured_outputs")

# Values of these fields that ask for nothing, beside None.
NEUTRAL: dict[str, Any] = {
    "best_of": 1, "use_beam_search": False, "length_penalty": 1.0, "early_stopping": False, "logits_processors": [],
    "flat_logprobs": False, "spaces_between_special_tokens": True, "include_reasoning": True, "skip_clone": False,
    "routed_experts_prompt_start": 0, "prompt_logprob_start": 0, "stream_interval": 1, "watermarking": False,
}


def asked_fields(given: dict[str, Any]) -> dict[str, Any]:
    """Return the given fields, without those of vLLM that Outrider lacks and whose value requests nothing, such as
    `best_of=1`. Other fields that Outrider lacks stay, so that they can be refused by name."""
    return {name: value for name, value in given.items()
            if name not in REFUSED_FIELDS or not (value is None or value == NEUTRAL.get(name))}


class _SamplingParamsType(type):
    """Metaclass that checks field names before an instance is made, because dataclass's own error would suggest no
    alternative."""

    def __call__(cls, *args: Any, **given: Any) -> Any:
        asked = asked_fields(given)
        check_names("SamplingParams", cls, asked, REFUSED_FIELDS)
        return super().__call__(*args, **asked)


class RequestOutputKind(enum.Enum):
    """The content of each item of a stream: the whole output so far, only the part that the reader has not seen, or the
    whole output once at the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(unsafe_hash=True)
class SamplingParams(metaclass=_SamplingParamsType):
    """The sampling settings of a request. A caller may change fields before the parameters are used: an engine checks
    them again and keeps a copy."""

    n: Annotated[int, Range(1, MAX_SAMPLES)] = 1
    temperature: Annotated[float, Range(0, 1e30)] = 1.0
    top_p: Annotated[float, Range(1e-30, 1)] = 1.0
    top_k: Annotated[int, Range(0, INT32, also=(-1,))] = 0  # 0 or -1: all
    min_p: Annotated[float, Range(0, 1)] = 0.0
    presence_penalty: Annotated[float, Range(-2, 2)] = 0.0
    frequency_penalty: Annotated[float, Range(-2, 2)] = 0.0
    repetition_penalty: Annotated[float, Range(1e-3, 1e3)] = 1.0
    seed: Seed | None = None  # None or -1: drawn from the engine's seed; the output says which
    max_tokens: Count | None = 16
    min_tokens: Annotated[int, Range(0, INT32)] = 0
    stop: Text | list[Text] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logit_bias: dict[TokenId, Bias] | None = None
    bad_words: list[Text] | None = None
    allowed_token_ids: Annotated[list[TokenId], NotEmpty] | None = None
    logprobs: Annotated[int, Range(0, INT32, also=(MAX_LOGPROBS_ALL,))] | None = None
    prompt_logprobs: Annotated[int, Range(0, INT32, also=(MAX_LOGPROBS_ALL,))] | None = None
    prompt_logprobs_mode: Annotated[str, OneOf(("raw", "processed"))] = "raw"  # processed: as tokens are drawn
    detokenize: bool = True
    skip_special_tokens: bool = True
    skip_reading_prefix_cache: bool | None = None
    speculative: bool | Annotated[int, Range(0, INT32)] | None = None  # False: no drafts; a number: at most so many
    structured_outputs: StructuredOutputsParams | None = None  # the form that the text must have
    bad_words_token_ids: tuple[tuple[TokenId, ...], ...] = ()  # filled from bad_words by the engine
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE  # streams: see RequestOutputKind
    extra_args: dict[str, Any] | None = None  # values for the engine's logits processors
    return_sampling_mask: bool = False  # the output has the ids that the filters kept at each place
    receipt: bool = False  # the output says what its tokens depend on; `logprobs` is then at least 0
    guided_decoding: InitVar[StructuredOutputsParams | None] = None  # vLLM's older name of structured_outputs

    def __post_init__(self, guided_decoding: StructuredOutputsParams | None) -> None:
        if guided_decoding is not None:
            self._take_form(guided_decoding)
        check_fields("SamplingParams: ", self)
        if self.seed == -1:
            self.seed = None
        if self.receipt and self.logprobs is None:
            self.logprobs = 0
        self._check_combinations()

    @classmethod
    def from_optional(cls, **given: Any) -> SamplingParams:
        """Make parameters from arguments, of which None leaves the field's default. `max_tokens=None` asks for as many
        tokens as fit."""
        if isinstance(given.get("logit_bias"), dict):  # keys from JSON are texts
            given["logit_bias"] = {int(token) if isinstance(token, str) and token.isdecimal() else token: bias
                                   for token, bias in given["logit_bias"].items()}
        return cls(**{name: value for name, value in given.items() if value is not None or name == "max_tokens"})

    def clone(self) -> SamplingParams:
        """Return a deep copy."""
        return copy.deepcopy(self)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def effective_bias(self) -> dict[int, float]:
        """Return `logit_bias` with values limited to MAX_BIAS, as the sampler adds them."""
        return {token: max(-MAX_BIAS, min(MAX_BIAS, value)) for token, value in (self.logit_bias or {}).items()}

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @cached_property
    def is_plain(self) -> bool:
        """Whether the request only draws at its temperature: logits are neither edited, filtered nor reported."""
        listed = self.logit_bias or self.bad_words or self.bad_words_token_ids or self.allowed_token_ids
        edits = listed or self.structured_outputs
        reports = self.num_reported is not None or self.prompt_logprobs is not None
        return not (edits or self.has_penalties or self.min_tokens or reports or self.filters)

    @property
    def filters(self) -> bool:
        """Whether filters may drop tokens."""
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def num_reported(self) -> int | None:
        """The number of likeliest tokens that steps report of each sampled place: `logprobs`, or more if the ids that
        filters keep are read from them. None: nothing is reported."""
        if not self.return_sampling_mask or self.logprobs == MAX_LOGPROBS_ALL:
            return self.logprobs
        return max(self.logprobs or 0, min(self.top_k, MAX_KEPT_IDS) + TIES if self.top_k > 0 else MAX_KEPT_IDS)

    @property
    def max_drafts(self) -> int | None:
        """Return the most drafts that the request allows. None leaves the number to the engine."""
        if self.speculative is None or self.speculative is True:
            return None
        return int(self.speculative)

    def _take_form(self, guided_decoding: object) -> None:
        if not isinstance(guided_decoding, StructuredOutputsParams):
            raise ValueError(f"SamplingParams: guided_decoding must be a GuidedDecodingParams, got "
                             f"{shown(guided_decoding)}")
        if self.structured_outputs is not None:
            raise ValueError("SamplingParams: guided_decoding and structured_outputs say the same thing (the form "
                             "of the output): give one of them")
        own = {field.name: getattr(guided_decoding, field.name) for field in fields(StructuredOutputsParams)}
        self.structured_outputs = StructuredOutputsParams(**own)

    def _check_combinations(self) -> None:
        if self.prompt_logprobs_mode == "processed":
            wrong = {"presence_penalty and its like": self.has_penalties, "min_tokens": self.min_tokens > 0,
                     "structured_outputs": self.structured_outputs is not None}
            for name in (name for name, is_given in wrong.items() if is_given):
                raise ValueError(f"SamplingParams: {name} depend on where the answer begins, and log-probabilities of "
                                 "a prompt are computed without an answer: leave them out, or use "
                                 "prompt_logprobs_mode='raw'")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"SamplingParams: min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})"
            )
        if self.stop_strings and not self.detokenize:
            raise ValueError("SamplingParams: stop strings need detokenize=True: set it, or use stop_token_ids")
        if self.is_greedy and self.n > 1:
            raise ValueError("SamplingParams: n > 1 with temperature 0 gives n equal samples; set temperature or n=1")


def request_seed(engine_seed: int, num_accepted: int) -> int:
    """Return the seed of a request that gives none, made from the engine's seed and the number of requests accepted
    before it. It has 53 bits, so that every JSON reader keeps it exactly."""
    digest = hashlib.blake2b(f"{engine_seed} {num_accepted}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 11


def need_sampling_params(given: object) -> SamplingParams:
    if not isinstance(given, SamplingParams):
        raise ValueError(f"sampling_params must be a SamplingParams, got {shown(given)}")
    return given


def check_params(given: object) -> SamplingParams:
    """Return a checked copy of the caller's `sampling_params`, because the caller may have changed its fields, and may
    change them later."""
    own = replace(need_sampling_params(given))
    for name in ("stop", "stop_token_ids", "logit_bias", "bad_words", "allowed_token_ids"):
        setattr(own, name, copy.copy(getattr(own, name)))
    own.extra_args = copy.deepcopy(own.extra_args)
    if own.structured_outputs is not None:
        own.structured_outputs = own.structured_outputs.to_plain()
    return own
