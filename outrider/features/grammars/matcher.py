"""TokenMatcher: the state of one output in its grammar. It decides which drafts the grammar allows next.

Only accepted tokens change the state permanently; after drafts it is rolled back. Importing this does not need
llguidance."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import takewhile
from typing import Any

NO_DETAILS = "<non-verbose/>"  # what errors end with where details are left out
MAX_MESSAGE = 400  # characters of an error


def short(message: str) -> str:
    """An error message of the grammar library on one line, cut to a bounded length."""
    message = " ".join(message.removesuffix(NO_DETAILS).split())
    return message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE - 3]}..."


class TokenMatcher:
    """Follows one output through its grammar. One thread at a time may use it."""

    def __init__(self, inner: Any, tokenizer: Any, eos_ids: Collection[int]) -> None:
        """inner: an LLMatcher that nothing else uses. tokenizer: the LLTokenizer that the matcher was made with."""
        self.inner = inner
        self._tokenizer = tokenizer
        self._eos_ids = frozenset(eos_ids)
        self._refused: int | None = None  # a token that the grammar does not know

    @property
    def error(self) -> str | None:
        """The reason why the grammar cannot go on, or None if nothing went wrong."""
        own = self.inner.get_error().removesuffix(NO_DETAILS).strip()  # a matcher at its limits refuses every token
        if not own and self._refused is not None:
            return f"token {self._refused} does not follow the grammar"
        return own or None

    def advance(self, token_ids: Sequence[int]) -> None:
        """Follow tokens that are a permanent part of the output. An end token ends the text and does not change the
        grammar's state."""
        tokens = self._before_end(token_ids)
        if tokens and self._refused is None:
            num_consumed = self.inner.try_consume_tokens(list(takewhile(self._is_known, tokens)))
            if num_consumed < len(tokens):
                self._refused = tokens[num_consumed]

    def allowed_prefix(self, drafts: Sequence[int]) -> list[int]:
        """Return the longest beginning of the drafts that the grammar allows and after which the text goes on."""
        tokens = list(takewhile(self._is_known, self._before_end(drafts)))
        return tokens[: self.inner.validate_tokens(tokens)] if tokens and self.error is None else []

    def guess(self, drafts: Sequence[int], most: int) -> list[int]:
        """At most `most` drafts: first the given drafts up to the first one that the grammar forbids, then the tokens
        that the grammar forces. Forced text is split as the tokenizer splits it: masks allow other splits, but the
        model has learned this one."""
        known = self.allowed_prefix(drafts[:most])
        if len(known) >= most or self.error is not None:
            return known
        num_followed = self._follow(known)
        text = self.inner.compute_ff_bytes()
        forced = self._tokenizer.tokenize_bytes(text) if text else []
        num_forced = self._follow(forced)
        guess = [*known, *forced[:num_forced]]
        if num_forced == len(forced) and self.inner.is_stopped() and self._eos_ids:
            guess.append(min(self._eos_ids))
        if num_followed + num_forced:
            self.inner.rollback(num_followed + num_forced)
        return guess[:most]

    def _follow(self, tokens: list[int]) -> int:
        """Move the matcher over the tokens that the grammar allows. Returns the number of these tokens."""
        return self.inner.try_consume_tokens(tokens) if tokens else 0

    def _before_end(self, token_ids: Sequence[int]) -> list[int]:
        return list(takewhile(lambda token: token not in self._eos_ids, token_ids))

    def _is_known(self, token: int) -> bool:
        """Whether the tokenizer has the token. A model's vocabulary may be padded beyond the tokenizer's, and a drafter
        may draft a padded id, after which the inner matcher could not be used any more."""
        return token < self._tokenizer.vocab_size
