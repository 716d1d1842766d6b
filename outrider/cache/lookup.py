"""PrefixLookup: finds the longest beginning of a request that other requests have computed or are computing.

It finds published pages and recurrent states. It also finds *promised* ones, which a step in flight will certainly
write (`promises.py`). A *horizon* is a step number: only promises of earlier steps count. The lookup stores the hashes
of the requests' tokens, and asks running requests to keep states; nothing else is changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.cache.checkpoints import Checkpoints
from outrider.cache.events import WEIGHTS_KEY, PageContent
from outrider.cache.groups import CacheLayout, Group
from outrider.cache.known_states import DigestAt
from outrider.cache.pages import PageKey, PagePool
from outrider.cache.prefix import PageHashes, longest_hit
from outrider.cache.promises import Promises
from outrider.core.input_part import NO_INPUTS, InputParts

Horizon = int  # promises of steps before this one count; 0: none do
NO_PROMISES: Horizon = 0


class PrefixLookup:
    def __init__(self, layout: CacheLayout, pool: PagePool, checkpoints: Checkpoints, promises: Promises, *,
                 has_lookahead: bool) -> None:
        """has_lookahead: whether a drafter writes to the cache before the target's step. If so, requests of one step do
        not share new pages."""
        self.pool, self.checkpoints, self.promises = pool, checkpoints, promises
        self._kind = layout.recurrent
        # Pages are written, layer by layer, before they are read, so that requests of one step can share them. A state,
        # and the slots that a drafter fills before a step, must lie there when the step begins.
        self._shares_within_step = not (self._kind.layers or has_lookahead)
        self._sizes = {group.page_tokens for group in layout.groups}
        self._target_groups = [group for group in layout.groups if group.is_target]
        self._version_keys: tuple[str, ...] = ()  # the version of the weights, unless they are the first
        self._hashes: dict[int, dict[int, PageHashes]] = {}  # by request, waiting or running, and page size

    # Hashes

    def open(self, request_id: int, keys: tuple[str, ...], inputs: InputParts = NO_INPUTS) -> None:
        """Begin to keep a request's hashes, unless this was done before. `keys`: values that must be equal for pages to
        be shared, in addition to the tokens."""
        if request_id not in self._hashes:
            keys = self._version_keys + keys  # in front: no salt can begin with a version
            self._hashes[request_id] = {size: PageHashes(size, keys, inputs) for size in self._sizes}

    def use_weights(self, version: int) -> None:
        """Make this version of the weights a part of all hashes, so that pages of other versions are no longer
        found."""
        self._version_keys = (f"{WEIGHTS_KEY}{version}",) if version else ()
        self._hashes.clear()

    def forget(self, request_id: int) -> None:
        self._hashes.pop(request_id, None)

    def digests(self, request_id: int, page_tokens: int, token_ids: Sequence[int], count: int) -> list[bytes]:
        """Return digests of at least the first `count` pages of a request."""
        return self._hashes[request_id][page_tokens].upto(token_ids, count)

    def content(self, request_id: int, group: Group, column: int, token_ids: Sequence[int]) -> PageContent | None:
        """Return the content of a full page for the record of cache events; None if events are not recorded."""
        if self.pool.events is None:
            return None
        size = group.page_tokens
        hashes = self._hashes[request_id][size]
        parent = hashes.upto(token_ids, column)[column - 1] if column else None
        return PageContent(parent, tuple(token_ids[column * size : (column + 1) * size]), hashes.keys)

    def digest_at(self, request_id: int, token_ids: Sequence[int]) -> DigestAt:
        size = self._kind.page_tokens
        return lambda boundary: self.digests(request_id, size, token_ids, boundary // size)[boundary // size - 1]

    # Pages and states

    def find(self, key: PageKey, horizon: Horizon) -> int | None:
        page = self.promises.find_page(key, horizon) if horizon else None
        return self.pool.find(key) if page is None else page

    def horizon(self, step: int | None) -> Horizon:
        """Return the horizon for a request in the batch of `step`: only promises of steps before the horizon may be
        used. If `step` is None, none may be used."""
        return NO_PROMISES if step is None else step + self._shares_within_step

    def find_state(self, digest: bytes, horizon: Horizon) -> list[int] | None:
        pages = self.checkpoints.states.find(digest)
        if pages is None and horizon:
            promised = self.promises.find_state(digest, horizon)
            return None if promised is None else promised.pages
        return pages

    def find_state_after(self, request_id: int, token_ids: Sequence[int], hit: int, horizon: Horizon) -> list[int]:
        """Return the pages of the recurrent state after a hit; none if the model has no recurrent layers."""
        if not (self._kind.layers and hit):
            return []
        pages = self.find_state(self.digest_at(request_id, token_ids)(hit), horizon)
        assert pages is not None, "a hit names a state that is not known"
        return pages

    def cached_last(self, request_id: int, token_ids: Sequence[int], group: Group, hit: int,
                    horizon: Horizon) -> dict[PageKey, int]:
        """Return the keys of the last pages of a prefix hit, as far back as the group's layers still read them, in the
        order of columns. Pages of a drafter's group may be missing, because they do not shorten a hit. The drafter
        cannot use pages before the last missing one, so these are left out."""
        count = hit // group.page_tokens
        digests = self.digests(request_id, group.page_tokens, token_ids, count)
        pages: list[tuple[PageKey, int]] = []
        for column in range(count - 1, group.kind.first_needed(hit) - 1, -1):
            key = group.index, digests[column]
            page = self.find(key, horizon)
            if page is None:
                break
            pages.append((key, page))
        return dict(reversed(pages))

    # Prefixes

    def longest(self, request_id: int, token_ids: Sequence[int], inputs: InputParts, horizon: Horizon) -> int:
        """Return the number of tokens of the longest prefix that is cached for all layers of the target. At least one
        token is always left to compute, so that there are logits to sample from."""
        digest_at, kind = self.digest_at(request_id, token_ids), self._kind

        def has_state(boundary: int) -> bool:
            return self.find_state(digest_at(boundary), horizon) is not None

        return self._longest(request_id, token_ids, horizon, lambda most: kind.serves(has_state, inputs.last_cut(most)))

    def find_common(self, request_id: int, token_ids: Sequence[int], inputs: InputParts, step: int | None,
                    hit: int) -> tuple[bool, int]:
        """Return whether a request should wait, because others are computing more of its beginning than `hit` tokens.
        If not, and cached pages reach further than any cached state, also return a boundary at which the request should
        keep its state. So a common beginning of any length is computed at most twice."""
        if not self._kind.layers:
            if step is None or self._shares_within_step or not self.promises:
                return False, 0
            return self.longest(request_id, token_ids, inputs, step + 1) > hit, 0
        digest_at = self.digest_at(request_id, token_ids)
        if self.checkpoints.is_promised(digest_at, len(token_ids), hit):
            return True, 0
        reach = self._longest(request_id, token_ids, NO_PROMISES if step is None else step + 1, inputs.last_cut)
        if reach <= hit:
            return False, 0
        if self.checkpoints.is_awaited(digest_at(reach)):
            return step is not None, 0
        writer = None if step is None else self._writer_of(request_id, token_ids, reach, step)
        if writer is not None and self.checkpoints.ask(writer, reach, digest_at(reach)):
            return True, 0
        return False, reach

    def _writer_of(self, request_id: int, token_ids: Sequence[int], end: int, step: int) -> int | None:
        """Return the request that fills, in `step`, the page that ends after `end` of these tokens. None if there is
        none."""
        group = self._target_groups[0]
        digests = self.digests(request_id, group.page_tokens, token_ids, end // group.page_tokens)
        return self.promises.writer_in(step, (group.index, digests[end // group.page_tokens - 1]))

    def _longest(self, request_id: int, token_ids: Sequence[int], horizon: Horizon,
                 serves_state: Callable[[int], int]) -> int:
        return longest_hit(lambda key: self.find(key, horizon) is not None, self._target_groups,
                           self._hashes[request_id], token_ids, len(token_ids) - 1, serves_state)
