"""RequestChecks: everything that may be wrong with a request, found before the engine takes it.

Reads the engine's limits and what it was started with; changes nothing, so any thread may ask.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from outrider.core import Limits
from outrider.core.fields import check_value, shown
from outrider.core.params import MAX_LOGPROBS_ALL, Priority, SamplingParams, check_params
from outrider.core.pooling import PoolingParams, RequestParams
from outrider.core.spans import NO_SPANS, PromptSpans, check_spans
from outrider.core.structured import StructuredOutputsParams
from outrider.core.token_ids import check_token_ids
from outrider.engine.grammar import GrammarCompiler
from outrider.engine.text import Tokenizer


class CheckedRequest(NamedTuple):
    """A request that the engine can serve."""

    token_ids: list[int]
    params: RequestParams  # with their words as tokens
    priority: int
    cache_salt: str | None
    spans: PromptSpans = NO_SPANS

    @property
    def num_samples(self) -> int:
        return self.params.n if isinstance(self.params, SamplingParams) else 1


@dataclass(frozen=True, slots=True)
class RequestChecks:
    """Every method raises a ValueError that says what to change, if the request cannot be served."""

    limits: Limits
    tokenizer: Tokenizer | None
    eos_ids: tuple[int, ...]
    max_logprobs: int
    takes_spans: bool  # prompts may mark spans
    grammars: GrammarCompiler | None

    def check(self, prompt_token_ids: list[int], params: RequestParams, *, priority: int = 0,
              cache_salt: str | None = None, bidirectional_spans: Sequence[Any] = ()) -> CheckedRequest:
        return self.check_prompt(prompt_token_ids, self.check_params(params), priority, cache_salt, bidirectional_spans)

    def check_prompt(self, prompt_token_ids: list[int], params: RequestParams, priority: int,
                     cache_salt: str | None, bidirectional_spans: Sequence[Any] = ()) -> CheckedRequest:
        """Like `check`, with parameters from `check_params`."""
        check_value("priority", Priority, priority)
        check_value("cache_salt", str | None, cache_salt)
        self._check_tokens(prompt_token_ids, max_len=self.limits.max_len - isinstance(params, SamplingParams))
        spans = self._check_spans(bidirectional_spans, len(prompt_token_ids)) if bidirectional_spans else NO_SPANS
        return CheckedRequest(prompt_token_ids, params, priority, cache_salt, spans)

    def check_params(self, given: RequestParams) -> RequestParams:
        """A copy of the parameters that the engine can serve, with their words as tokens. Requests may share it."""
        if isinstance(given, PoolingParams):
            return given.checked(self.limits.hidden_size)
        limits, params = self.limits, check_params(given)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            most = limits.vocab_size if value == MAX_LOGPROBS_ALL else value
            if most is not None and most > self.max_logprobs:
                raise ValueError(f"{name}={value} exceeds max_logprobs={self.max_logprobs} of this engine")
        if params.stop_strings and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and this engine has none: use stop_token_ids")
        params = self._with_bad_word_ids(params)
        check_token_ids(params, self.eos_ids, limits)
        if params.structured_outputs is not None:
            self._need_grammars().check(params.structured_outputs.to_plain())
        return params

    def start_form_check(self, form: StructuredOutputsParams) -> Future[None]:
        """Compiles a grammar that is new, which may take seconds, in a thread: whoever must not wait for that in
        `check` calls this before."""
        return self._need_grammars().start_check(form.to_plain())

    def _need_grammars(self) -> GrammarCompiler:
        if self.grammars is None:
            raise ValueError("structured_outputs need a tokenizer, and this engine has none")
        return self.grammars

    def _check_tokens(self, token_ids: list[int], max_len: int) -> None:
        if not token_ids:
            raise ValueError("the prompt is empty: give at least one token")
        if len(token_ids) > max_len:
            raise ValueError(
                f"the prompt has {len(token_ids)} tokens and max_model_len is {self.limits.max_len}, which leaves no "
                "room for an answer: shorten the prompt or raise max_model_len"
            )
        if set(map(type, token_ids)) != {int}:
            token = next(token for token in token_ids if type(token) is not int)
            raise ValueError(f"prompt token ids must be integers, got {shown(token)}")
        for token in (min(token_ids), max(token_ids)):
            if not 0 <= token < self.limits.vocab_size:
                raise ValueError(f"prompt token id {shown(token)} is outside the vocabulary of "
                                 f"{self.limits.vocab_size}")

    def _check_spans(self, spans: Sequence[Any], prompt_len: int) -> PromptSpans:
        if not self.takes_spans:
            raise ValueError("bidirectional_spans are not served by this engine: start it with "
                             "attention_backend='flex' (or 'torch'), for a model whose layers are all attention")
        # In the worst case every other request computes one token and its drafts beside the span.
        limits = self.limits
        most = limits.max_batched_tokens - limits.max_requests * (1 + limits.max_drafts)
        return check_spans(spans, prompt_len, most)

    def _with_bad_word_ids(self, params: SamplingParams) -> SamplingParams:
        if not params.bad_words or params.bad_words_token_ids:
            return params
        if self.tokenizer is None:
            raise ValueError("bad_words need a tokenizer, and this engine has none: use logit_bias, allowed_token_ids")
        words: dict[tuple[int, ...], None] = {}
        for word in params.bad_words:
            # At the start of a text and after a space a word has different tokens: forbid both.
            for text in (word.lstrip(), " " + word.lstrip()):
                words[tuple(self.tokenizer.encode(text, add_special_tokens=False))] = None
        return replace(params, bad_words_token_ids=tuple(words))
