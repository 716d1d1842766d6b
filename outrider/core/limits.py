"""Limits: the sizes from which every buffer, table and capacity is derived. Axis: the axes by which buffers are
declared."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from outrider.core.draft_confidence import NUM_LEVELS
from outrider.core.feature_parts import LimitsPart, Part, find_part

PAGE_TOKENS = (16, 32, 64, 128)  # sizes that a page may have
NULL_PAGE = 0  # never owned by a request; padded and forgotten table entries point here
NULL_ROW = 0  # never owned by a request; padded rows point here


class Axis(enum.Enum):
    """An axis of a persistent buffer, named after its entries, such as rows or tokens. Buffers are declared by axes,
    never by bare integers, and `Limits.extent` gives the size of each."""

    ROWS = "rows"  # running requests and the null row
    REQUESTS = "requests"  # requests of one batch
    STARTS = "starts"  # requests of one batch plus one (query starts)
    TOKENS = "tokens"  # token rows of one batch
    LENGTH = "length"  # tokens of one request
    DRAFTS = "drafts"  # drafts of one request in one step
    RUN = "run"  # tokens a step can yield for one request: drafts plus one
    LOGIT_ROWS = "logit rows"  # rows that reach the sampler in one step
    VOCAB = "vocabulary"
    STOP_IDS = "stop ids"  # token ids that end a request
    MASK_WORDS = "mask words"  # 32 tokens of the vocabulary each
    LIST_INTS = "list integers"  # integers of all rows' logit biases and bad words together
    BATCHES = "batches"  # one: numbers of a whole batch
    CHANCES = "chances"  # levels of confidence of every draft of one request


@dataclass(frozen=True)
class Limits:
    """The sizes that every buffer, table and capacity is derived from."""

    max_requests: int
    max_batched_tokens: int
    max_len: int
    max_drafts: int
    vocab_size: int
    max_stop_ids: int = 64
    max_list_ints: int = 1 << 20
    max_logprobs: int = 20  # most likely tokens that a request may have reported beside its own
    steps_in_flight: int = 2
    hidden_size: int = 1  # size of the hidden states that results may carry
    parts: tuple[LimitsPart, ...] = ()  # sizes of features, at most one part of each kind

    def extent(self, axis: Axis) -> int:
        return {
            Axis.ROWS: self.max_requests + 1,
            Axis.REQUESTS: self.max_requests,
            Axis.STARTS: self.max_requests + 1,
            Axis.TOKENS: self.max_batched_tokens,
            Axis.LENGTH: self.max_len,
            Axis.DRAFTS: self.max_drafts,
            Axis.RUN: self.max_drafts + 1,
            Axis.LOGIT_ROWS: min(self.max_batched_tokens, self.max_requests * (self.max_drafts + 1)),
            Axis.VOCAB: self.vocab_size,
            Axis.STOP_IDS: self.max_stop_ids,
            Axis.MASK_WORDS: -(-self.vocab_size // 32),
            Axis.LIST_INTS: self.max_list_ints,
            Axis.BATCHES: 1,
            Axis.CHANCES: self.max_drafts * NUM_LEVELS,
        }[axis]

    def part(self, kind: type[Part]) -> Part | None:
        """Return the part of the limits with this type, which has sizes of one feature's buffers, or None."""
        return find_part(self.parts, kind)

    @property
    def max_lookahead(self) -> int:
        """The most cache positions past the computed tokens that a drafter may write: one for the last known token and
        one for each draft."""
        return self.max_drafts + 1 if self.max_drafts else 0

    @property
    def max_unsettled_tokens(self) -> int:
        """The most tokens of one request that can be in flight, in steps without a result yet."""
        return self.steps_in_flight * self.max_batched_tokens
