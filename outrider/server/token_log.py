"""Log-probabilities of /v1/completions: the tokens of one text, each with its offset in the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from outrider.core.outputs import Logprob
from outrider.engine.detokenize import TokenOffsets
from outrider.engine.text import Tokenizer
from outrider.server.generation import finite, named_by_id, top_token_ids

Entry: TypeAlias = dict[int, Logprob] | None  # None: the first token of a prompt, which has no log-probability


class TokenLog:
    """Collects the tokens of one text with log-probabilities and text offsets, for the field `logprobs` of OpenAI's
    API.

    An offset never lies beyond the text sent so far: in a stream, a token waits until the text in which it begins was
    sent. If a stop string cut off a token's text, the token's offset is the end of the text.

    begin: the offset at which this text begins. by_id: name tokens by their ids instead of their texts.
    """

    def __init__(self, tokenizer: Tokenizer | None, skip_special_tokens: bool, num_top: int, begin: int = 0, *,
                 by_id: bool = False) -> None:
        self._offsets = None if tokenizer is None else TokenOffsets(tokenizer, skip_special_tokens)
        self._names = {} if tokenizer is None else tokenizer.token_texts
        self._num_top, self._begin, self._num_given, self._by_id = num_top, begin, 0, by_id
        self._waiting: list[tuple[int, int, Entry]] = []  # offset, token, log-probabilities

    def add(self, token_ids: Sequence[int], entries: Sequence[Entry]) -> None:
        offsets = [0] * len(token_ids) if self._offsets is None else self._offsets.feed(token_ids)
        self._waiting += zip(offsets, token_ids, entries, strict=True)

    def take(self, num_characters: int, is_last: bool) -> dict[str, list[Any]]:
        """Return the entries of tokens that are ready: those that begin in the text sent so far, or in the
        `num_characters` that are sent next. If `is_last`, all tokens are ready."""
        self._num_given += num_characters
        num_ready = len(self._waiting) if is_last else sum(offset <= self._num_given for offset, _, _ in self._waiting)
        ready, self._waiting = self._waiting[:num_ready], self._waiting[num_ready:]
        written = [self._written(token_id, entry) for _, token_id, entry in ready]
        return {"tokens": [name for name, _, _ in written], "token_logprobs": [value for _, value, _ in written],
                "top_logprobs": [top for _, _, top in written],
                "text_offset": [self._begin + min(offset, self._num_given) for offset, _, _ in ready]}

    def _written(self, token_id: int, entry: Entry) -> tuple[str, float | None, dict[str, float | None] | None]:
        if entry is None:
            return named_by_id(token_id) if self._by_id else self._names[token_id], None, None
        # The chosen token is always there, as OpenAI's API has it. Tokens that are parts of a character look the same:
        # the likeliest of them is named.
        ids = [token_id, *reversed(top_token_ids(entry, self._num_top))]
        top = {self._name(one, entry): finite(entry[one].logprob) for one in ids}
        return self._name(token_id, entry), finite(entry[token_id].logprob), top

    def _name(self, token_id: int, entry: dict[int, Logprob]) -> str:
        return named_by_id(token_id) if self._by_id else entry[token_id].decoded_token or ""
