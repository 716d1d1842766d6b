"""FormLeases: which compiled grammars (forms) are kept, and which requests lease them. It only counts; workers compile.

A request leases its form from its check, where the form was compiled, to its end. A leased form is never dropped, so no
step has to compile one. Forms without leases stay for later requests while they fit into the bounds:

    compiled --check--> leased --the last request has ended--> idle --check--> leased
                                                                 \\--no room, least recently used--> dropped

The number and size of leased forms are bounded. When the bound is reached, clients that already lease their equal share
of it are refused new forms.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from weakref import WeakSet

from outrider.core.checked_request import CheckedRequest
from outrider.core.request_keeper import RequestKeeper
from outrider.features.grammars.form_lease import FormLease, FormsBusy

NUM_KEPT = 64  # compiled forms, from which idle ones are dropped
KEPT_BYTES = 48 << 20  # of compiled forms, from which idle ones are dropped; the last one is kept whatever its size
MAX_LEASED = 4096  # forms that have leases
LEASED_BYTES = 1 << 30  # of forms that have leases


@dataclass
class _Kept:
    """A compiled grammar and its leases."""

    digest: bytes
    num_bytes: int
    live: Counter[FormLease] = field(default_factory=Counter)  # of requests in the engine
    checked: WeakSet[FormLease] = field(default_factory=WeakSet)  # of requests that have not been added yet
    forgotten: set[FormLease] = field(default_factory=set)  # of requests that the engine may bring back

    @property
    def is_leased(self) -> bool:
        return bool(self.live or self.checked or self.forgotten)

    def is_leased_by(self, client: str | None) -> bool:
        return any(lease.client == client for lease in self._leases())

    def clients(self) -> set[str | None]:
        return {lease.client for lease in self._leases()}

    def _leases(self) -> chain[FormLease]:
        return chain(self.live, self.checked, self.forgotten)


class FormLeases(RequestKeeper):
    """The compiled grammars that are kept, and their leases. May be used by several threads."""

    def __init__(self, drop: Callable[[int], object]) -> None:
        """drop: makes the workers forget the compiled grammar of a number."""
        self._drop = drop
        # A trace function may raise where `with` ends, before the release: the thread it happens to can still go on.
        self._lock = threading.RLock()
        self._kept: OrderedDict[int, _Kept] = OrderedDict()  # by number, least recently used first
        self._numbers: dict[bytes, int] = {}  # of kept forms, by the digest of the form
        self._to_drop: deque[int] = deque()
        self._num_bytes = 0

    # Checks

    def is_kept(self, digest: bytes) -> bool:
        with self._lock:
            return digest in self._numbers

    def holds(self, number: int) -> bool:
        """Whether a compiled grammar is kept under this number."""
        with self._lock:
            return number in self._kept

    def take(self, digest: bytes, client: str | None) -> FormLease | None:
        """Lease a grammar for a request that is being checked. None if the grammar is not compiled. Raises FormsBusy if
        the client leases too many."""
        with self._lock:
            number = self._numbers.get(digest)
            if number is None:
                return None
            kept = self._kept[number]
            if not kept.is_leased_by(client):
                self._check_room(client, kept)
            self._kept.move_to_end(number)
            return self._lease(number, client)

    def keep(self, digest: bytes, number: int, num_bytes: int, client: str | None) -> FormLease:
        """Lease a grammar that has just been compiled under this number. If an equal grammar has been compiled for
        another client's request in the meantime, the lease gets that grammar's number, and this number is dropped."""
        with self._lock:
            if (own := self.take(digest, client)) is not None:
                self._to_drop.append(number)
            else:
                kept = _Kept(digest, num_bytes)
                self._check_room(client, kept)
                self._kept[number], self._numbers[digest] = kept, number
                self._num_bytes += num_bytes
                own = self._lease(number, client)
        self._make_room()
        return own

    def again(self, lease: FormLease) -> FormLease:
        """Make another lease of the same grammar, for a request that was checked together with the owner of this
        lease."""
        with self._lock:
            return self._lease(lease.number, lease.client)

    def check_room(self, client: str | None) -> None:
        """Raise FormsBusy if the client may not lease another grammar, however small."""
        with self._lock:
            self._check_room(client, _Kept(b"", 0))

    # Requests of the engine

    def enter(self, requests: Sequence[CheckedRequest]) -> None:
        leases = [lease for asked in requests if (lease := asked.part(FormLease)) is not None]
        if not leases:
            return
        with self._lock:
            for lease in leases:
                if self._numbers.get(lease.digest) != lease.number:
                    raise FormsBusy("the request's compiled grammar has been dropped: send the request again")
            for lease in leases:
                self._kept[lease.number].live[lease] += 1
                self._kept.move_to_end(lease.number)

    def leave(self, asked: CheckedRequest) -> None:
        lease = asked.part(FormLease)
        if lease is None:
            return
        with self._lock:
            kept = self._kept.get(lease.number)
            if kept is None:
                return
            kept.live[lease] -= 1
            if kept.live[lease] <= 0:
                del kept.live[lease]
                kept.checked.discard(lease)
        if not kept.is_leased:
            self._make_room()

    def forget_requests(self) -> None:
        with self._lock:
            for kept in self._kept.values():
                kept.forgotten.update(kept.live)
                kept.live.clear()

    def drop_unused(self) -> None:
        with self._lock:
            for kept in self._kept.values():
                kept.checked -= kept.forgotten - kept.live.keys()
                kept.forgotten.clear()
        self._make_room()

    def close(self) -> None:
        self.forget_requests()
        self.drop_unused()

    # Inside

    def _lease(self, number: int, client: str | None) -> FormLease:
        kept = self._kept[number]
        lease = FormLease(number, kept.digest, client)
        kept.checked.add(lease)
        return lease

    def _check_room(self, client: str | None, new: _Kept) -> None:
        """Raise FormsBusy if a new grammar exceeds both bounds: that of all leased grammars, and the client's equal
        share of it."""
        if client is None or (len(self._kept) < MAX_LEASED and self._num_bytes + new.num_bytes <= LEASED_BYTES):
            return
        leased = [kept for kept in self._kept.values() if kept.is_leased and kept is not new]
        own = [kept for kept in leased if kept.is_leased_by(client)]
        share = len({client}.union(*(kept.clients() for kept in leased)))
        if own and _is_over([*leased, new], 1) and _is_over([*own, new], share):
            raise FormsBusy(f"unfinished requests of this client use {len(own)} compiled grammars, the most there may "
                            "be: try again when some of these requests have ended")

    def _make_room(self) -> None:
        """Drop grammars without leases, least recently used first, until the rest are within the bounds."""
        with self._lock:
            if self._is_crowded():
                for number in [number for number, kept in self._kept.items() if not kept.is_leased]:
                    if not self._is_crowded():
                        break
                    kept = self._kept.pop(number)
                    self._num_bytes -= kept.num_bytes
                    del self._numbers[kept.digest]
                    self._to_drop.append(number)
        with suppress(IndexError):  # another thread drops the rest
            while self._to_drop:
                self._drop(self._to_drop.popleft())

    def _is_crowded(self) -> bool:
        return len(self._kept) > 1 and (len(self._kept) > NUM_KEPT or self._num_bytes > KEPT_BYTES)


def _is_over(forms: Sequence[_Kept], share: int) -> bool:
    """Whether the grammars exceed one client's share of the bounds on leased grammars. share: the number of clients
    that share the bounds equally."""
    return len(forms) > MAX_LEASED / share or sum(kept.num_bytes for kept in forms) > LEASED_BYTES / share
