"""Checkpoints: which pages hold recurrent states, of which prefix, and which may be written by the steps to come.

Pages are given to a boundary before a step that may reach it, and known to others only after a step has reported that
it wrote them: never by a length. They give way to whoever needs pages to run. Tensors and tokens' meaning are unknown.

    open     pages given, no step has reported them; or reported, and kept as the row's latest until it ends
    known    published by the hash of the tokens before it; cached in the pool, least recently used first
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from outrider.cache.kinds import RecurrentKind
from outrider.cache.pages import PageKey, PagePool
from outrider.cache.prefix import PageHashes
from outrider.core import CheckpointWrite, Limits

NOT_HANDED_OUT = sys.maxsize


@dataclass(frozen=True, slots=True)
class Reach:
    """How many tokens a row's stored state has seen, as far as the host can know. Accepted drafts that wait to be
    folded do not count."""

    settled: int  # confirmed by results
    before: int  # when the step begins, at least
    least: int  # when it has stored the state
    most: int


@dataclass(slots=True)
class Checkpoint:
    """Pages for one boundary of one request, until they are published or given back."""

    id: int
    row: int
    boundary: int
    pages: list[int]
    owner: int | None  # request; None once it has ended and only the report is missing
    step: int = NOT_HANDED_OUT  # the last step that may write it
    digest: bytes = b""  # what it will be known by, if it has no owner


@dataclass(slots=True)
class _Own:
    """A running request's checkpoints."""

    row: int
    known: int  # tokens when it was admitted
    hashes: dict[int, PageHashes]
    pending: dict[int, Checkpoint] = field(default_factory=dict)  # by boundary, not reported
    latest: Checkpoint | None = None  # reported, not published


class Checkpoints:
    def __init__(self, kind: RecurrentKind, group: int, pool: PagePool, limits: Limits) -> None:
        self.kind, self.pool = kind, pool
        self.capacity = kind.capacity(limits)
        self.num_written = self.num_restored = self.num_folded = 0
        self._group = group  # checkpoints as the pool sees them: a group without a page table
        self._ids = count(1)
        self._open: dict[int, Checkpoint] = {}  # by id, oldest first
        self._requests: dict[int, _Own] = {}
        self._known: dict[bytes, tuple[int, list[int]]] = {}  # (id, pages); some of the pages may be gone
        self._restoring: dict[int, list[int]] = {}  # by request: held until the batch that restores is made
        self._folds: list[Checkpoint] = []  # for the next batch
        self._settled_step = -1

    @property
    def num_droppable(self) -> int:
        """Pages that `make_room` can give back."""
        return len(self._open) * self.capacity.checkpoint_pages

    @property
    def has_folds(self) -> bool:
        return bool(self._folds)

    # Admission

    def serves(self, hashes: dict[int, PageHashes], token_ids: Sequence[int], candidate: int) -> int:
        """The longest prefix of at most `candidate` tokens with a state to begin from."""

        def has_checkpoint(boundary: int) -> bool:
            return self._find(self._digest(hashes, token_ids, boundary)) is not None

        return self.kind.serves(has_checkpoint, candidate)

    def is_promised(self, hashes: dict[int, PageHashes], token_ids: Sequence[int]) -> bool:
        """A request that has ended left a checkpoint of these tokens that is not reported yet: worth the wait."""
        promised = [c for c in self._open.values() if c.owner is None and c.boundary < len(token_ids)]
        return any(
            self._digest(hashes, token_ids, c.boundary) == c.digest and self._find(c.digest) is None for c in promised
        )

    def pages_to_restore(self, hashes: dict[int, PageHashes], token_ids: Sequence[int], hit: int) -> int:
        """Pages that restoring takes from the free ones until the batch is made."""
        pages = self._find(self._digest(hashes, token_ids, hit)) if self.kind.layers and hit else None
        return sum(not self.pool.is_held(page) for page in pages or ())

    def admit(self, request_id: int, row: int, token_ids: Sequence[int], hashes: dict[int, PageHashes],
              hit: int) -> None:
        self._requests[request_id] = _Own(row, len(token_ids), hashes)
        if hit and self.kind.layers:
            pages = self._find(self._digest(hashes, token_ids, hit))
            assert pages is not None, "a hit names a state that is not known"
            for page in pages:
                self.pool.hold(page)
            self._restoring[request_id] = pages
            self.num_restored += 1

    def restored(self, request_id: int) -> list[int]:
        """Pages of the state that the request begins from."""
        return self._restoring.get(request_id, [])

    # Before a step

    def grant(self, step: int, request_id: int, reach: Reach) -> list[CheckpointWrite]:
        """Pages for the boundaries that the step may bring the request's state to, as far as there are any."""
        own = self._requests[request_id]
        for boundary in [b for b in own.pending if b <= reach.settled]:
            self._drop(own.pending[boundary])  # passed by a step that did not write it
        writes: list[CheckpointWrite] = []
        for boundary in self._wanted(own, reach):
            checkpoint = own.pending.get(boundary) or self._give(request_id, own, boundary)
            if checkpoint is not None:
                checkpoint.step = step
                writes.append(CheckpointWrite(checkpoint.id, own.row, boundary, checkpoint.pages))
        return writes

    def take_folds(self, step: int) -> list[CheckpointWrite]:
        """Rows that ended with accepted drafts pending, for the batch that is being made."""
        folds, self._folds = self._folds, []
        for checkpoint in folds:
            checkpoint.step = step
        self.num_folded += len(folds)
        return [CheckpointWrite(c.id, c.row, c.boundary, c.pages) for c in folds]

    def end_restoring(self) -> None:
        """The batch that restores is made: what comes after it may take the pages."""
        for pages in self._restoring.values():
            self._free(pages)
        self._restoring = {}

    def make_room(self, num_pages: int) -> bool:
        """So many free pages, by giving up what is open, oldest first. False, with nothing given up, if that is not
        enough. Reports of it are ignored when they come."""
        if num_pages > self.pool.num_free + self.num_droppable:
            return False
        while self.pool.num_free < num_pages:
            self._drop(next(iter(self._open.values())))
        return True

    # After a step

    def settle(self, step: int, written: Sequence[int], tokens_of: Callable[[int], Sequence[int]]) -> None:
        """A step's report. `tokens_of` a request: its known tokens, as they were when the step ran or later."""
        self._settled_step = step
        for checkpoint_id in written:
            checkpoint = self._open.get(checkpoint_id)
            if checkpoint is None:
                continue  # given up while the step was in flight
            self.num_written += 1
            if checkpoint.owner is None:
                self._publish(checkpoint, checkpoint.digest)
            else:
                self._keep(checkpoint, self._requests[checkpoint.owner], tokens_of(checkpoint.owner))
        for checkpoint in [c for c in self._open.values() if c.owner is None and c.step <= step]:
            self._drop(checkpoint)  # its last chance has passed

    def drop_promised(self) -> None:
        """A step failed: what rows of ended requests hold is unknown now, and so is what will be written of it."""
        for checkpoint in [c for c in self._open.values() if c.owner is None]:
            self._drop(checkpoint)

    def retire(self, request_id: int, token_ids: Sequence[int], settled: int, folded: int, *, is_exact: bool) -> None:
        """A request is about to give up its row. Its latest checkpoint is published; what steps in flight may still
        write is published when they report it.

        `is_exact`: the request has ended, and its device state has `settled` tokens of which those after `folded` wait
        to be folded. If they reach a boundary, the row is folded in the next batch."""
        own = self._requests[request_id]
        if own.latest is not None:
            self._publish(own.latest, self._digest(own.hashes, token_ids, own.latest.boundary))
        end = settled // self.kind.page_tokens * self.kind.page_tokens
        if is_exact and folded < end and self._find(self._digest(own.hashes, token_ids, end)) is None:
            checkpoint = own.pending.get(end) or self._give(request_id, own, end)
            if checkpoint is not None:
                checkpoint.step = NOT_HANDED_OUT
                self._folds.append(checkpoint)
                self._orphan(checkpoint, own, token_ids)
        for checkpoint in list(own.pending.values()):
            is_in_flight = not is_exact and checkpoint.step > self._settled_step
            if is_in_flight and checkpoint.boundary <= len(token_ids):
                self._orphan(checkpoint, own, token_ids)

    def free(self, request_id: int) -> None:
        own = self._requests.pop(request_id)
        for checkpoint in [*own.pending.values(), *([] if own.latest is None else [own.latest])]:
            self._give_back(checkpoint)
        self._free(self._restoring.pop(request_id, []))

    # Looking

    def held(self) -> list[int]:
        """Every page held, once for each holder."""
        pages = [page for checkpoint in self._open.values() for page in checkpoint.pages]
        return pages + [page for restoring in self._restoring.values() for page in restoring]

    def check_integrity(self) -> None:
        owned = {c.id for own in self._requests.values() for c in own.pending.values()}
        owned |= {own.latest.id for own in self._requests.values() if own.latest is not None}
        assert owned == {c.id for c in self._open.values() if c.owner is not None}, "a checkpoint is lost"
        for own in self._requests.values():
            held = len(own.pending) + (own.latest is not None)
            assert held <= self.capacity.max_checkpoints, "more checkpoints than capacity"
        for checkpoint in self._folds:
            assert checkpoint.id in self._open and checkpoint.owner is None, "a fold without pages"

    # Inside

    def _wanted(self, own: _Own, reach: Reach) -> list[int]:
        """Boundaries that are kept for good, and those one of which will be the row's latest."""
        size, interval = self.kind.page_tokens, self.kind.interval
        first = (reach.before // size + 1) * size
        latest = max(first, reach.least // size * size)
        kept = (reach.before // interval + 1) * interval
        wanted = {*range(latest, reach.most + 1, size), *range(kept, reach.most + 1, interval)}
        prompt_end = self.kind.last_boundary(own.known)
        return sorted(wanted | {prompt_end} if first <= prompt_end <= reach.most else wanted)

    def _give(self, request_id: int, own: _Own, boundary: int) -> Checkpoint | None:
        held = len(own.pending) + (own.latest is not None)
        num_pages = self.capacity.checkpoint_pages
        if held >= self.capacity.max_checkpoints or self.pool.num_free < num_pages:
            return None
        pages = [self.pool.allocate(self._group)[0] for _ in range(num_pages)]
        checkpoint = Checkpoint(next(self._ids), own.row, boundary, pages, request_id)
        self._open[checkpoint.id] = own.pending[boundary] = checkpoint
        return checkpoint

    def _keep(self, checkpoint: Checkpoint, own: _Own, token_ids: Sequence[int]) -> None:
        """Written: known to all from now on, or the row's latest."""
        del own.pending[checkpoint.boundary]
        if own.latest is not None:
            self._drop(own.latest)
        if self.kind.is_kept(checkpoint.boundary, own.known):
            self._publish(checkpoint, self._digest(own.hashes, token_ids, checkpoint.boundary))
        else:
            own.latest = checkpoint

    def _orphan(self, checkpoint: Checkpoint, own: _Own, token_ids: Sequence[int]) -> None:
        del own.pending[checkpoint.boundary]
        checkpoint.owner = None
        checkpoint.digest = self._digest(own.hashes, token_ids, checkpoint.boundary)

    def _publish(self, checkpoint: Checkpoint, digest: bytes) -> None:
        self._unlink(checkpoint)
        known = self._find(digest)
        if known is not None:
            for page in known:  # used again: as recent as the pages of attention that go with it
                self.pool.hold(page)
            self._free(known)
        else:
            for page, key in zip(checkpoint.pages, self._keys(digest, checkpoint.id), strict=True):
                self.pool.publish(page, key)
            self._known[digest] = (checkpoint.id, checkpoint.pages)
            if len(self._known) > self.pool.num_pages:
                self._known = {d: entry for d, entry in self._known.items() if self._find(d) is not None}
        self._give_back(checkpoint)

    def _drop(self, checkpoint: Checkpoint) -> None:
        self._unlink(checkpoint)
        self._give_back(checkpoint)

    def _unlink(self, checkpoint: Checkpoint) -> None:
        """From wherever it waits."""
        if checkpoint.owner is None:
            self._folds = [fold for fold in self._folds if fold is not checkpoint]
            return
        own = self._requests[checkpoint.owner]
        if own.latest is checkpoint:
            own.latest = None
        elif own.pending.get(checkpoint.boundary) is checkpoint:
            del own.pending[checkpoint.boundary]

    def _give_back(self, checkpoint: Checkpoint) -> None:
        del self._open[checkpoint.id]
        self._free(checkpoint.pages)

    def _free(self, pages: list[int]) -> None:
        for page in reversed(pages):
            self.pool.free(page)

    def _find(self, digest: bytes) -> list[int] | None:
        """The pages known by a digest, if none of them has been taken for something else."""
        entry = self._known.get(digest)
        if entry is None:
            return None
        checkpoint_id, pages = entry
        keys = self._keys(digest, checkpoint_id)
        return pages if all(self.pool.find(key) == page for key, page in zip(keys, pages, strict=True)) else None

    def _keys(self, digest: bytes, checkpoint_id: int) -> list[PageKey]:
        """One per page. The id is in them, so that the pages of two checkpoints of one prefix never mix."""
        stem = digest + checkpoint_id.to_bytes(8, "little")
        return [(self._group, stem + i.to_bytes(4, "little")) for i in range(self.capacity.checkpoint_pages)]

    def _digest(self, hashes: dict[int, PageHashes], token_ids: Sequence[int], boundary: int) -> bytes:
        size = self.kind.page_tokens
        return hashes[size].upto(token_ids, boundary // size)[boundary // size - 1]
