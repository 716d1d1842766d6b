"""MediaLookup: a PrefixLookup that also knows what places beyond the device hold. MarkedCheckpoints: checkpoints whose
states inside a prompt these places evict first."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.cache.checkpoints import HANDED_OUT, Checkpoint, Checkpoints
from outrider.cache.groups import CacheLayout
from outrider.cache.lookup import PrefixLookup
from outrider.cache.media import PageMedia
from outrider.cache.observed_pool import ObservedPool
from outrider.cache.pages import PageKey
from outrider.cache.prefix import longest_hit
from outrider.core.input_part import InputParts


class MarkedCheckpoints(Checkpoints):
    """Checkpoints that mark states inside a prompt when they are published: other places evict these first."""

    pool: ObservedPool

    def next_id(self) -> int:
        return next(self._ids)

    def _publish(self, checkpoint: Checkpoint, digest: bytes) -> None:
        self.pool.queue.is_boundary = not self._is_interior(checkpoint)
        super()._publish(checkpoint, digest)
        self.pool.queue.is_boundary = True

    def _is_interior(self, checkpoint: Checkpoint) -> bool:
        if checkpoint.state is not HANDED_OUT or checkpoint.boundary % self.kind.interval:
            return False
        return checkpoint.boundary != self.kind.last_boundary(self._requests[checkpoint.request_id].known)


class WideLookup(PrefixLookup):
    """A PrefixLookup that also knows what other places hold."""

    def __init__(self, layout: CacheLayout, inner: PrefixLookup, media: PageMedia, *, has_lookahead: bool) -> None:
        super().__init__(layout, inner.pool, inner.checkpoints, inner.promises, has_lookahead=has_lookahead)
        self._media, self._state_group = media, len(layout.groups)

    def reach(self, request_id: int, token_ids: Sequence[int], inputs: InputParts) -> int:
        """The number of tokens of the longest prefix whose pages and state are published on the device or lie in
        another place."""
        digest_at, kind = self.digest_at(request_id, token_ids), self._kind

        def has_page(key: PageKey) -> bool:
            return self.pool.find(key) is not None or self._media.has(self._media.key_of(*key))

        def has_state(boundary: int) -> bool:
            digest = digest_at(boundary)
            found = self.checkpoints.states.find(digest)
            return found is not None or all(map(self._media.has, self.state_keys(digest)))

        return longest_hit(has_page, self._target_groups, self._hashes[request_id], token_ids, len(token_ids) - 1,
                           lambda most: kind.serves(has_state, inputs.last_cut(most)))

    def state_keys(self, digest: bytes) -> list[bytes]:
        """The keys of the pages of the recurrent state after the tokens of this digest."""
        return [self._media.key_of(self._state_group, digest, index)
                for index in range(self.checkpoints.capacity.checkpoint_pages)]
