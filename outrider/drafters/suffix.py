"""SuffixDrafter: proposes the tokens that followed the longest matching suffix: in the request's own tokens, in other
running samples of its prompt, or in outputs of the same tenant that finished recently. It runs on the host, without
torch.

The host knows only the tokens up to the last result that it has read, so its drafts begin there. The device drops the
leading drafts whose positions have been computed since."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from itertools import islice, takewhile

ANCHOR = 3  # tokens of the n-gram that finds candidates; shorter suffixes match too often
LONGEST = 64  # longest match that is looked for
MAX_CANDIDATES = 32  # latest occurrences that are compared
MAX_SIBLINGS = 63  # running samples of the same prompt that are searched, the latest first


class _IndexedTokens:
    """One token sequence, and an index of where each of its n-grams occurs. It is extended as the sequence grows."""

    __slots__ = ("tokens", "places", "group", "_done")

    def __init__(self, group: tuple[str, int] | None = None) -> None:
        """group: for a running request, its tenant and the hash of its prompt."""
        self.group = group
        self.tokens: Sequence[int] = []
        self.places: dict[tuple[int, ...], list[int]] = {}
        self._done = 0  # n-grams that end before here are indexed

    def extend(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens
        for end in range(max(self._done, ANCHOR), len(tokens) + 1):
            self.places.setdefault(tuple(tokens[end - ANCHOR : end]), []).append(end)
        self._done = max(self._done, len(tokens) + 1)


class SuffixDrafter:
    """Drafts from tokens that are kept on the host. `propose` drafts for running requests; `finish` keeps a request's
    tokens, so that later requests of the same tenant can match them. The oldest are dropped first, so that at most
    `max_tokens` tokens are kept in all."""

    def __init__(self, num_kept: int = 64, max_tokens: int = 1 << 18, never: Collection[int] = ()) -> None:
        """num_kept: how many finished requests of each tenant are kept. never: tokens that occur in prompts but never
        in text; drafts end before them."""
        self._never = never
        self._own: dict[int, _IndexedTokens] = {}
        self._groups: dict[tuple[str, int], dict[int, _IndexedTokens]] = {}  # running requests of the same prompt
        self._tenant_of: OrderedDict[int, str] = OrderedDict()  # kept requests, oldest first
        self._kept: dict[str, OrderedDict[int, _IndexedTokens]] = {}
        self._num_kept, self._max_tokens = num_kept, max_tokens
        self.num_tokens = 0  # of all kept requests
        self.last_match = 0  # tokens of the suffix that the last proposal follows

    def propose(self, request_id: int, token_ids: Sequence[int], prompt_len: int, num_wanted: int,
                tenant: str) -> list[int]:
        own = self._own.get(request_id) or self._enter(request_id, (tenant, hash(tuple(token_ids[:prompt_len]))))
        own.extend(token_ids)
        self.last_match = 0
        if len(token_ids) < ANCHOR or num_wanted < 1:
            return []
        anchor = tuple(token_ids[-ANCHOR:])
        best_length, best = 0, None
        for source in (own, *self._siblings(own), *reversed(self._kept.get(tenant, OrderedDict()).values())):
            for end in reversed(source.places.get(anchor, ())[-MAX_CANDIDATES:]):
                if source is own and end == len(token_ids):
                    continue
                length = _common_suffix(token_ids, source.tokens, end)
                if length > best_length and end < len(source.tokens):
                    best_length, best = length, (source.tokens, end)
        self.last_match = best_length
        found = [] if best is None else list(best[0][best[1] : best[1] + num_wanted])
        return list(takewhile(lambda token: token not in self._never, found)) if self._never else found

    def finish(self, request_id: int, token_ids: Sequence[int], tenant: str) -> None:
        indexed = self._leave(request_id)
        if len(token_ids) > self._max_tokens:
            return
        indexed.extend(list(token_ids))
        kept = self._kept.setdefault(tenant, OrderedDict())
        kept[request_id], self._tenant_of[request_id] = indexed, tenant
        self.num_tokens += len(indexed.tokens)
        if len(kept) > self._num_kept:
            self._drop(next(iter(kept)))
        while self.num_tokens > self._max_tokens:
            self._drop(next(iter(self._tenant_of)))

    def _enter(self, request_id: int, group: tuple[str, int]) -> _IndexedTokens:
        own = self._own[request_id] = _IndexedTokens(group)
        self._groups.setdefault(group, {})[request_id] = own
        return own

    def _leave(self, request_id: int) -> _IndexedTokens:
        own = self._own.pop(request_id, None)
        if own is None or own.group is None:
            return own or _IndexedTokens()
        del self._groups[own.group][request_id]
        if not self._groups[own.group]:
            del self._groups[own.group]
        own.group = None
        return own

    def _siblings(self, own: _IndexedTokens) -> Iterator[_IndexedTokens]:
        """Return the running requests of the same tenant with the same prompt, such as the samples of one group in
        training."""
        assert own.group is not None, "it runs"
        others = (each for each in reversed(self._groups[own.group].values()) if each is not own)
        return islice(others, MAX_SIBLINGS)

    def _drop(self, request_id: int) -> None:
        tenant = self._tenant_of.pop(request_id)
        self.num_tokens -= len(self._kept[tenant].pop(request_id).tokens)
        if not self._kept[tenant]:
            del self._kept[tenant]


def _common_suffix(tokens: Sequence[int], others: Sequence[int], end: int) -> int:
    """Return the length of the common suffix of `tokens` and others[:end]."""
    most = min(LONGEST, end, len(tokens))
    return next((n for n in range(most) if others[end - 1 - n] != tokens[-1 - n]), most)
