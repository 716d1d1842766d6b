"""StepNeeds and StepExtras: which sampler stages and lists a batch needs. The host works them out before the step.

StepNeeds are flags, so that a stage that no request asks for costs nothing. StepExtras are the rarely used lists of
requests (logit bias, allowed tokens, bad words). Each list is kept once, together with the logit rows that use it.
Neither depends on the tokens or lengths of requests.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import torch

from outrider.core.params import MAX_LOGPROBS_ALL, SamplingParams
from outrider.kernels.buffers import to_device
from outrider.sample.listed_rows import ListedRows


@dataclass(frozen=True)
class StepNeeds:
    """The stages of the sampler that a batch needs, because a request with logit rows asks for them."""

    any_sampled: bool = False
    any_allowed: bool = False
    any_bad_words: bool = False
    any_min_tokens: bool = False
    any_logit_bias: bool = False
    any_repetition: bool = False
    any_output_counts: bool = False  # presence or frequency penalties
    any_masks: bool = False  # a feature has written which tokens are allowed
    is_edited: bool = False  # a feature edits the logits
    any_min_p: bool = False
    any_top_p: bool = False
    max_top_k: int = 0  # 0: no request has a top-k
    any_top_p_alone: bool = False  # top-p without top-k: it may keep any number of tokens
    max_logprobs: int | None = None  # -1: the whole vocabulary
    are_lists_placed: bool = True  # logit biases and bad words lie in row state, where kernels read them

    @classmethod
    def from_params(cls, params: list[SamplingParams], logit_counts: list[int], *,
                    are_lists_placed: bool = True, any_masks: bool = False, is_edited: bool = False) -> StepNeeds:
        asked = [p for p, count in zip(params, logit_counts, strict=True) if count > 0]
        sampled = [p for p in asked if not p.is_greedy]  # filters cannot change a greedy choice
        logprobs = [num for p in asked if (num := p.num_reported) is not None]
        return cls(
            any_sampled=bool(sampled),
            any_allowed=any(p.allowed_token_ids is not None for p in asked),
            any_bad_words=any(p.bad_words_token_ids for p in asked),
            any_min_tokens=any(p.min_tokens > 0 for p in asked),
            any_logit_bias=any(p.logit_bias for p in asked),
            any_repetition=any(p.repetition_penalty != 1 for p in asked),
            any_output_counts=any(p.presence_penalty != 0 or p.frequency_penalty != 0 for p in asked),
            any_masks=any_masks,
            any_min_p=any(p.min_p > 0 for p in sampled),
            any_top_p=any(p.top_p < 1 for p in sampled),
            max_top_k=max((p.top_k for p in sampled if p.top_k > 0), default=0),
            any_top_p_alone=any(p.top_p < 1 and p.top_k <= 0 for p in sampled),
            max_logprobs=MAX_LOGPROBS_ALL if MAX_LOGPROBS_ALL in logprobs else max(logprobs, default=None),
            are_lists_placed=are_lists_placed,
            is_edited=is_edited,
        )

    @classmethod
    def everything(cls, max_logprobs: int | None) -> StepNeeds:
        """Return the needs of a captured step that serves any batch: every stage runs, and reads from the rows whether
        a row uses it. Only kernels can run with these needs; the torch code needs the flags of the batch that it
        samples."""
        return cls(True, True, True, True, True, any_repetition=True, any_output_counts=True, any_masks=True,
                   any_min_p=True, any_top_p=True, max_top_k=1, max_logprobs=max_logprobs)

    @property
    def any_penalties(self) -> bool:
        return self.any_repetition or self.any_output_counts

    @property
    def any_edits(self) -> bool:
        """Whether any request changes single logits, for example by a bias or a penalty."""
        listed = self.any_allowed or self.any_bad_words or self.any_logit_bias
        return listed or self.any_min_tokens or self.any_penalties or self.any_masks or self.is_edited

    @property
    def any_top_k(self) -> bool:
        return self.max_top_k > 0

    @property
    def any_filters(self) -> bool:
        return self.any_min_p or self.any_top_p or self.any_top_k

    @property
    def is_draw(self) -> bool:
        """Whether the step only chooses tokens, greedily or at a temperature: no logits are edited or filtered, and no
        log-probabilities reported."""
        return not (self.any_edits or self.any_filters or self.max_logprobs is not None)


@dataclass(frozen=True)
class LogitBias:
    """The logit biases of a step. Entry e adds value[e] to the logit of token[e]. No token occurs twice in the list of
    one request."""

    rows: ListedRows
    token: torch.Tensor  # [E] int64
    value: torch.Tensor  # [E] float64


@dataclass(frozen=True)
class AllowedTokens:
    """The logit rows whose requests allow only some tokens. The allowed tokens themselves are in the row state."""

    rows: tuple[int, ...]  # ascending
    logit_row: torch.Tensor  # [R] int64

    def between(self, start: int, stop: int) -> AllowedTokens:
        at = slice(bisect_left(self.rows, start), bisect_left(self.rows, stop))
        return AllowedTokens(tuple(row - start for row in self.rows[at]), self.logit_row[at] - start)


@dataclass(frozen=True)
class BadWords:
    """Bad words of a step with similar numbers of tokens, so that no word is padded to the length of a much longer one.
    Entry e forbids token last[e] if the tokens before it, latest first, are before[e, :num_before[e]]."""

    rows: ListedRows
    last: torch.Tensor  # [E] int64
    before: torch.Tensor  # [E, P] int64
    num_before: torch.Tensor  # [E] int64


class LogitEditor(Protocol):
    """Interface through which a feature changes the logit rows [L, V] of one step in place."""

    failed_rows: list[int]  # logit rows from which no token may be chosen

    @property
    def failures(self) -> Mapping[int, str]:
        """Error messages, by the request's index in the batch."""

    def edit(self, logits: torch.Tensor) -> None: ...

    def shape(self, scaled: torch.Tensor) -> None:
        """Change logits in place after they were divided by their temperatures. Called after `edit`."""


@dataclass(frozen=True)
class StepExtras:
    """The lists of rarely used parameters for one step. A field is empty if no request of the step uses it."""

    bias: LogitBias | None = None
    allowed: AllowedTokens | None = None
    bad_words: tuple[BadWords, ...] = ()  # one for each padded length
    editor: LogitEditor | None = None

    @classmethod
    def from_params(cls, params: list[SamplingParams], logit_counts: list[int], device: torch.device) -> StepExtras:
        layout = list(_layout(params, logit_counts))
        return cls(_logit_bias(layout, device), _allowed_tokens(layout, device), _bad_words(layout, device))

    def check(self, needs: StepNeeds) -> None:
        """Assert that the needs and the extras come from the same batch; otherwise a list would be ignored silently."""
        asked = (needs.any_logit_bias, needs.any_allowed, needs.any_bad_words, needs.is_edited)
        given = (self.bias is not None, self.allowed is not None, bool(self.bad_words), self.editor is not None)
        assert asked == given, f"logit bias, allowed tokens, bad words, editor: asked {asked}, given {given}"

    def between(self, start: int, stop: int) -> StepExtras:
        """Return the extras of logit rows start to stop, with row `start` renumbered as 0."""
        assert self.editor is None, "an editor sees all logit rows of a step together"
        bias, allowed, words = self.bias, self.allowed, self.bad_words
        return StepExtras(None if bias is None else replace(bias, rows=bias.rows.between(start, stop)),
                          None if allowed is None else allowed.between(start, stop),
                          tuple(replace(own, rows=own.rows.between(start, stop)) for own in words))


Layout: TypeAlias = list[tuple[SamplingParams, range]]
Word: TypeAlias = tuple[int, ...]


def _layout(params: list[SamplingParams], logit_counts: list[int]) -> Iterator[tuple[SamplingParams, range]]:
    """Yield the parameters of each request with the range of its logit rows."""
    start = 0
    for p, count in zip(params, logit_counts, strict=True):
        yield p, range(start, start + count)
        start += count


def _logit_bias(layout: Layout, device: torch.device) -> LogitBias | None:
    asked = [(p.effective_bias, own) for p, own in layout if p.logit_bias and len(own)]
    if not asked:
        return None
    tokens = [token for bias, _ in asked for token in bias]
    values = [value for bias, _ in asked for value in bias.values()]
    return LogitBias(ListedRows.from_lists([(own, len(bias)) for bias, own in asked], device),
                     to_device(tokens, torch.int64, device), to_device(values, torch.float64, device))


def _allowed_tokens(layout: Layout, device: torch.device) -> AllowedTokens | None:
    rows = tuple(row for p, own in layout if p.allowed_token_ids is not None for row in own)
    return AllowedTokens(rows, to_device(rows, torch.int64, device)) if rows else None


def _bad_words(layout: Layout, device: torch.device) -> tuple[BadWords, ...]:
    by_width: dict[int, list[tuple[range, list[Word]]]] = {}
    for words, own in ((p.bad_words_token_ids, own) for p, own in layout if len(own)):
        of_request: dict[int, list[Word]] = {}
        for word in words:
            of_request.setdefault(_padded_width(word), []).append(word)
        for width, some in of_request.items():
            by_width.setdefault(width, []).append((own, some))
    return tuple(_words_of_width(width, lists, device) for width, lists in by_width.items())


def _padded_width(word: Word) -> int:
    """The number of tokens before a word's last one, rounded up to a power of two."""
    num_before = len(word) - 1
    return 1 << (num_before - 1).bit_length() if num_before else 0


def _words_of_width(width: int, lists: list[tuple[range, list[Word]]], device: torch.device) -> BadWords:
    packed = [[word[-1], len(word) - 1, *reversed(word[:-1]), *[0] * (width + 1 - len(word))]
              for _, words in lists for word in words]
    ids = to_device(packed, torch.int64, device)
    return BadWords(ListedRows.from_lists([(own, len(words)) for own, words in lists], device), last=ids[:, 0],
                    num_before=ids[:, 1], before=ids[:, 2:])
