"""Checkpoints: copies of recurrent states (of Mamba layers, for example) in cache pages, from which other requests can
begin.

Keys and values can be reused up to any full page, but a recurrent state exists only after the last token. So steps save
the state at certain *boundaries*, which are numbers of tokens. A checkpoint gets pages before a step that may reach its
boundary. It is published, so that other requests can find it, only after a step has reported that it wrote the pages.
Running requests that need pages may take them from unpublished checkpoints. Drafts that a step has accepted enter the
state only in a later step, which *folds* them into it. This file uses no tokens and no tensors.

    handed out --reported--> latest --the request ends--> published
        |--reported, and kept for good------------------> published
        |--the request ends, steps in flight------------> promised --reported--> published
        |--the request ends, drafts wait to be folded---> folding --batch made--> promised
    A checkpoint that is not published may be dropped at any time."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

from outrider.cache.known_states import DigestAt, KnownStates
from outrider.cache.pages import PagePool
from outrider.core import CheckpointWrite, Limits


class CheckpointState(enum.Enum):
    HANDED_OUT = "handed out"  # steps up to `last_step` may write it for its running request
    LATEST = "latest"  # written at the running request's latest boundary; other requests cannot find it yet
    FOLDING = "folding"  # its request has ended, and the next batch folds the row's drafts up to it
    PROMISED = "promised"  # its request has ended, and steps up to `last_step` may still write it
    PUBLISHED = "published"  # every request can find it
    DROPPED = "dropped"


HANDED_OUT, LATEST, FOLDING, PROMISED, PUBLISHED, DROPPED = CheckpointState
OWNED = {HANDED_OUT, LATEST}  # states in which a running request owns the checkpoint
_MOVES = {
    HANDED_OUT: {LATEST, FOLDING, PROMISED, PUBLISHED, DROPPED},
    LATEST: {PUBLISHED, DROPPED},
    FOLDING: {PROMISED, PUBLISHED, DROPPED},
    PROMISED: {PUBLISHED, DROPPED},
}


@dataclass(frozen=True, slots=True)
class StateProgress:
    """The number of tokens that the stored recurrent state of a row covers, according to the host. Accepted drafts that
    are not yet folded into the state do not count."""

    settled: int  # tokens confirmed by results
    before: int  # least tokens when the step begins
    least: int  # least tokens when the step has stored the state
    most: int  # most tokens then


@dataclass(slots=True)
class Checkpoint:
    """The copy of one request's recurrent state after `boundary` tokens, and the pages that it is written to."""

    id: int
    request_id: int
    row: int
    boundary: int
    pages: list[int]
    last_step: int  # the last step that may write it
    is_kept: bool  # published as soon as a step has written it; otherwise it lives until the row's next one
    state: CheckpointState = HANDED_OUT
    digest: bytes = b""  # digest of the tokens before the boundary; set when its request has ended

    @property
    def is_open(self) -> bool:
        return self.state is not PUBLISHED and self.state is not DROPPED

    @property
    def write(self) -> CheckpointWrite:
        return CheckpointWrite(self.id, self.row, self.boundary, self.pages)


@dataclass(slots=True)
class RequestCheckpoints:
    """The unpublished checkpoints of one running request, by boundary."""

    row: int
    known: int  # known tokens when the request was admitted
    by_boundary: dict[int, Checkpoint] = field(default_factory=dict)
    awaited: dict[int, bytes] = field(default_factory=dict)  # boundaries ahead that others wait for, with their digests
    marked: frozenset[int] = frozenset()  # boundaries before resume points of its inputs

    def in_state(self, state: CheckpointState) -> list[Checkpoint]:
        return [checkpoint for checkpoint in self.by_boundary.values() if checkpoint.state is state]


class Checkpoints:
    def __init__(self, states: KnownStates, group: int, pool: PagePool, limits: Limits) -> None:
        self.states, self.kind, self.pool = states, states.kind, pool
        self.capacity = self.kind.capacity(limits)
        self.num_written = self.num_folded = 0
        self._group = group  # to the pool, checkpoints are a group without a page table
        self._ids = count(1)
        self._open: dict[int, Checkpoint] = {}  # neither published nor dropped; by id, oldest first
        self._num_open: Counter[CheckpointState] = Counter()
        self._requests: dict[int, RequestCheckpoints] = {}
        self._awaited: set[bytes] = set()  # digests of the boundaries that running requests are asked to keep
        self._settled_step = -1

    @property
    def num_droppable(self) -> int:
        """Return the number of pages that `make_room` can free."""
        return len(self._droppable()) * self.capacity.checkpoint_pages

    @property
    def has_folds(self) -> bool:
        return self._num_open[FOLDING] > 0

    def is_promised(self, digest_at: DigestAt, num_tokens: int, hit: int) -> bool:
        """Whether a request that has ended left a checkpoint of these tokens that is not written yet and covers more
        than `hit` of them. A new request then waits for the checkpoint instead of computing the tokens again."""
        promised = [c for c in self._in_state(FOLDING, PROMISED) if hit < c.boundary < num_tokens]
        return any(digest_at(c.boundary) == c.digest and self.states.find(c.digest) is None for c in promised)

    def admit(self, request_id: int, row: int, num_known: int, resume_points: Iterable[int] = ()) -> None:
        """resume_points: see `InputPart.resume_points`."""
        marked = frozenset(self.kind.last_boundary(point + 1) for point in resume_points)
        self._requests[request_id] = RequestCheckpoints(row, num_known, marked=marked)

    # States asked for: prompts that begin alike part at any boundary, and a state is worth keeping there

    def is_awaited(self, digest: bytes) -> bool:
        """Whether a running request was asked to keep its state after these tokens and has not passed them yet."""
        return digest in self._awaited

    def ask(self, request_id: int, boundary: int, digest: bytes) -> bool:
        """Ask a request to keep its state at a boundary that it has not passed. Returns False if the request was
        already asked for another one: a request keeps one extra state at a time."""
        own = self._requests[request_id]
        if not self._is_kept(own, boundary) and any(not self._is_kept(own, other) for other in own.awaited):
            return False
        own.awaited[boundary] = digest
        self._awaited.add(digest)
        return True

    # Before a step

    def grant(self, step: int, request_id: int, progress: StateProgress) -> list[CheckpointWrite]:
        """Return the checkpoints that the request may reach in the step, with pages to write them to. A checkpoint for
        which the pool has too few free pages is left out."""
        own = self._requests[request_id]
        for checkpoint in own.in_state(HANDED_OUT) if own.by_boundary else ():
            if checkpoint.boundary <= progress.settled:  # passed by a step that did not write it
                self._move(checkpoint, DROPPED)
        writes: list[CheckpointWrite] = []
        for boundary in self._wanted(own, progress):
            wanted = own.by_boundary.get(boundary) or self._open_checkpoint(request_id, own, boundary)
            if wanted is not None:
                wanted.last_step = step
                wanted.is_kept |= boundary in own.awaited
                writes.append(wanted.write)
        self._forget_awaited(own, progress.least)  # the step passes these, with a state or without
        return writes

    def sure_to_be_kept(self, request_id: int, progress: StateProgress) -> list[Checkpoint]:
        """Return the checkpoints that the step will certainly write and publish, whatever the results of steps in
        flight are. Called just after `grant` for the same step."""
        own = self._requests[request_id]
        least = min(progress.least, own.known)
        return [c for c in own.in_state(HANDED_OUT) if c.is_kept and progress.before < c.boundary <= least]

    def take_folds(self, step: int) -> list[CheckpointWrite]:
        """Return the checkpoints of ended requests that still lack accepted drafts. The batch that is being made folds
        these drafts into the saved states."""
        folds = self._in_state(FOLDING)
        for checkpoint in folds:
            checkpoint.last_step = step
            self._move(checkpoint, PROMISED)
        self.num_folded += len(folds)
        return [checkpoint.write for checkpoint in folds]

    def make_room(self, num_pages: int) -> bool:
        """Drop unpublished checkpoints, oldest first, until `num_pages` pages are free. Returns False, with nothing
        dropped, if that cannot be reached. `settle` ignores dropped checkpoints that a step in flight still
        reports as written."""
        droppable = self._droppable()
        if num_pages > self.pool.num_free + len(droppable) * self.capacity.checkpoint_pages:
            return False
        oldest = iter(droppable)
        while self.pool.num_free < num_pages:
            self._move(next(oldest), DROPPED)
        return True

    # After a step

    def settle(self, step: int, written: Sequence[int], digest_of: Callable[[int, int], bytes],
               failed: Collection[int] = ()) -> None:
        """Publish, keep or drop checkpoints after a step has ended. `written`: ids of the checkpoints that the step
        wrote. `digest_of(request, boundary)`: digest of a running request's tokens before the boundary. `failed`:
        requests whose values are not finite, so that their states are dropped."""
        self._settled_step = step
        for checkpoint_id in written:
            checkpoint = self._open.get(checkpoint_id)
            if checkpoint is None:
                continue  # dropped while the step was in flight
            self.num_written += 1
            if checkpoint.request_id in failed:
                self._move(checkpoint, DROPPED)
                continue
            if checkpoint.state is not HANDED_OUT:
                self._publish(checkpoint, checkpoint.digest)
                continue
            own = self._requests[checkpoint.request_id]
            for older in own.in_state(LATEST):
                self._move(older, DROPPED)
            if checkpoint.is_kept:
                self._publish(checkpoint, digest_of(checkpoint.request_id, checkpoint.boundary))
            else:
                self._move(checkpoint, LATEST)
        for checkpoint in self._in_state(PROMISED):
            if checkpoint.last_step <= step:  # no later step can write it
                self._move(checkpoint, DROPPED)

    def drop_open(self) -> None:
        """Drop all unpublished checkpoints after a failed step, which leaves the content of rows and pages unknown."""
        for checkpoint in list(self._open.values()):
            self._move(checkpoint, DROPPED)

    def retire(self, request_id: int, digest_at: DigestAt, num_tokens: int, settled: int, folded: int, *,
               is_exact: bool) -> None:
        """Publish the latest checkpoint of a request with `num_tokens` known tokens, which is about to give up its row.
        Checkpoints that steps in flight may still write are published when a step reports them.

        `is_exact`: the request has ended after exactly `settled` tokens, and its state has those up to `folded`. If a
        boundary lies between, the next batch folds the tokens up to it into the state."""
        own = self._requests[request_id]
        for checkpoint in own.in_state(LATEST):
            self._publish(checkpoint, digest_at(checkpoint.boundary))
        if not is_exact:
            for checkpoint in own.in_state(HANDED_OUT):
                if checkpoint.last_step > self._settled_step and checkpoint.boundary <= num_tokens:
                    checkpoint.digest = digest_at(checkpoint.boundary)
                    self._move(checkpoint, PROMISED)
            return
        end = settled // self.kind.page_tokens * self.kind.page_tokens
        if folded < end and self.states.find(digest_at(end)) is None:
            last = own.by_boundary.get(end) or self._open_checkpoint(request_id, own, end)
            if last is not None:
                last.digest = digest_at(end)
                self._move(last, FOLDING)

    def free(self, request_id: int) -> None:
        """Drop the checkpoints that a request still owns when it gives up its row."""
        own = self._requests[request_id]
        for checkpoint in list(own.by_boundary.values()):
            self._move(checkpoint, DROPPED)
        self._forget_awaited(own, max(own.awaited, default=0))
        del self._requests[request_id]

    # Looking

    def held(self) -> list[int]:
        """Return every page that an unpublished checkpoint holds."""
        return [page for checkpoint in self._open.values() for page in checkpoint.pages]

    def check_integrity(self) -> None:
        owned = {c.id for own in self._requests.values() for c in own.by_boundary.values()}
        assert owned == {c.id for c in self._open.values() if c.state in OWNED}, "a checkpoint is lost"
        assert +self._num_open == Counter(c.state for c in self._open.values()), "checkpoints are miscounted"
        asked = {digest for own in self._requests.values() for digest in own.awaited.values()}
        assert asked == self._awaited, "a state is awaited that no request was asked to keep"
        for own in self._requests.values():
            assert len(own.by_boundary) <= self.capacity.max_checkpoints, "more checkpoints than capacity"

    # Inside

    def _droppable(self) -> list[Checkpoint]:
        """Return unpublished checkpoints that can be dropped, oldest first. Checkpoints from which a request of the
        next batch begins are left out."""
        restoring = set(self.states.held())
        if not restoring:
            return list(self._open.values())
        return [checkpoint for checkpoint in self._open.values() if checkpoint.pages[0] not in restoring]

    def _in_state(self, *states: CheckpointState) -> list[Checkpoint]:
        if not any([self._num_open[state] for state in states]):
            return []
        return [checkpoint for checkpoint in self._open.values() if checkpoint.state in states]

    def _wanted(self, own: RequestCheckpoints, progress: StateProgress) -> list[int]:
        """Return the boundaries at which the step should write a checkpoint if it reaches them: those whose checkpoint
        is published at once, and every boundary that may turn out to be the row's latest."""
        size, interval = self.kind.page_tokens, self.kind.interval
        first = (progress.before // size + 1) * size
        latest = max(first, progress.least // size * size)
        kept = (progress.before // interval + 1) * interval
        wanted = {*range(latest, progress.most + 1, size), *range(kept, progress.most + 1, interval)}
        single = {self.kind.last_boundary(own.known), *own.awaited}
        wanted |= {boundary for boundary in single if first <= boundary <= progress.most}
        if own.marked:  # the last ones of those for which there is room
            room = max(0, self.capacity.max_checkpoints - len(own.by_boundary) - len(wanted))
            marked = sorted(boundary for boundary in own.marked - wanted if first <= boundary <= progress.most)
            wanted.update(marked[len(marked) - min(room, len(marked)) :])
        return sorted(wanted)

    def _is_kept(self, own: RequestCheckpoints, boundary: int) -> bool:
        return boundary in own.marked or self.kind.is_kept(boundary, own.known)

    def _forget_awaited(self, own: RequestCheckpoints, passed: int) -> None:
        """Forget the boundaries up to `passed` tokens at which this request was asked to keep its state."""
        for boundary in [boundary for boundary in own.awaited if boundary <= passed]:
            self._awaited.discard(own.awaited.pop(boundary))

    def _open_checkpoint(self, request_id: int, own: RequestCheckpoints, boundary: int) -> Checkpoint | None:
        """Make a checkpoint that the next step may write at this boundary, and allocate its pages. Returns None if the
        request has the most unpublished checkpoints already, or if the pool has too few free pages."""
        num_pages = self.capacity.checkpoint_pages
        if len(own.by_boundary) >= self.capacity.max_checkpoints or self.pool.num_free < num_pages:
            return None
        pages = [self.pool.allocate(self._group, is_overwritten=True) for _ in range(num_pages)]
        is_kept = boundary in own.awaited or self._is_kept(own, boundary)
        checkpoint = Checkpoint(next(self._ids), request_id, own.row, boundary, pages, self._settled_step, is_kept)
        self._open[checkpoint.id] = own.by_boundary[boundary] = checkpoint
        self._num_open[HANDED_OUT] += 1
        return checkpoint

    def _publish(self, checkpoint: Checkpoint, digest: bytes) -> None:
        self.states.publish(digest, checkpoint.id, checkpoint.pages)
        self._move(checkpoint, PUBLISHED)

    def _move(self, checkpoint: Checkpoint, state: CheckpointState) -> None:
        """Change a checkpoint's state, and remove it from the collections that it leaves. No other method changes
        states."""
        assert state in _MOVES[checkpoint.state], f"a checkpoint moves from {checkpoint.state} to {state}"
        self._num_open[checkpoint.state] -= 1
        if checkpoint.state in OWNED and state not in OWNED:
            del self._requests[checkpoint.request_id].by_boundary[checkpoint.boundary]
        checkpoint.state = state
        if state is PUBLISHED or state is DROPPED:
            del self._open[checkpoint.id]
            for page in reversed(checkpoint.pages):
                self.pool.free(page)
        else:
            self._num_open[state] += 1
