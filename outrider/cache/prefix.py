"""Chained hashes of full pages, and the search for the longest prefix that all groups of the target have cached.

The hash of a page covers everything up to its end: tokens, salt and other keys. Two requests share a page only if all
of these are equal.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence

from outrider.cache.groups import Group
from outrider.cache.pages import PageKey
from outrider.core.input_part import NO_INPUTS, InputParts


class PageHashes:
    """A request's chain of page hashes for one page size. It is extended as results confirm tokens."""

    __slots__ = ("keys", "_page_tokens", "_digests", "_root", "_inputs")

    def __init__(self, page_tokens: int, keys: tuple[str, ...], inputs: InputParts = NO_INPUTS) -> None:
        self.keys = keys
        self._page_tokens = page_tokens
        self._digests: list[bytes] = []
        self._inputs = inputs
        self._root = hashlib.blake2b("\x00".join(keys).encode(), digest_size=16).digest()

    def upto(self, token_ids: Sequence[int], num_pages: int) -> list[bytes]:
        """Return hashes of at least the first `num_pages` pages; token_ids must cover them."""
        digests, size = self._digests, self._page_tokens
        while len(digests) < num_pages:
            start = len(digests) * size
            parent = digests[-1] if digests else self._root
            page = array("q", token_ids[start : start + size])
            assert len(page) == size, "a page is hashed before it is full"
            if self._inputs:
                page.extend(self._inputs.page_content(start, start + size, token_ids))
            digests.append(hashlib.blake2b(parent + page.tobytes(), digest_size=16).digest())
        return digests


def longest_hit(
    is_known: Callable[[PageKey], bool], groups: Sequence[Group], hashes: dict[int, PageHashes],
    token_ids: Sequence[int], most: int, serves_state: Callable[[int], int] = int,
) -> int:
    """Return the length of the longest prefix of at most `most` tokens that all groups have cached. A candidate length
    is lowered until all groups have it.

    `is_known`: whether there is a page with this key. `serves_state` lowers a candidate to a length after which the
    state of the recurrent layers is cached."""
    step = max(group.page_tokens for group in groups)
    candidate = most // step * step
    found: dict[PageKey, bool] = {}  # a page is asked for again whenever another group lowers the candidate
    while candidate > 0:
        lowered = candidate
        for group in groups:
            digests = hashes[group.page_tokens].upto(token_ids, lowered // group.page_tokens)

            def is_cached(column: int, index: int = group.index, digests: list[bytes] = digests) -> bool:
                key = index, digests[column]
                known = found.get(key)
                if known is None:
                    known = found[key] = is_known(key)
                return known

            lowered = group.kind.serves(is_cached, lowered) // step * step
        lowered = serves_state(lowered)
        if lowered == candidate:
            return candidate
        candidate = lowered
    return 0
