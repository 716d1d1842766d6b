"""Promises: pages and recurrent states that steps in flight are writing, and the requests that already use them.

Requests that arrive together often begin with the same tokens. Pages are published only when the result of their step
has come, so without promises each of these requests would compute the common tokens itself. With a promise, pages and
states that a step will certainly write can be found at once:

    batch made     pages that known tokens of a request fill, and checkpoints that are kept there, are promised
    shared         other requests begin from them; their steps run after the step that writes the pages
    result comes   the pages are published, whether or not their writer still runs; but if the writer's values are not
                   finite, or a state was not written, the promise is broken and the sharing requests start again
    step fails     all promises are erased, and all requests lose their rows

A promise holds its pages until its step has ended. Only known tokens are promised, never drafts. This file uses no
tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from outrider.cache.checkpoints import Checkpoint
from outrider.cache.events import PageContent
from outrider.cache.pages import PageKey, PagePool


@dataclass(slots=True, eq=False)
class Promise:
    """The pages and recurrent states that one step is writing for one request, and from which other requests may begin
    already."""

    step: int
    writer: int  # request
    pages: dict[PageKey, int] = field(default_factory=dict)
    contents: dict[PageKey, PageContent] = field(default_factory=dict)  # if events are recorded
    states: dict[bytes, Checkpoint] = field(default_factory=dict)  # by digest of the tokens before the boundary
    sharers: set[int] = field(default_factory=set)  # requests that began from it and still have their rows
    shared_states: set[int] = field(default_factory=set)  # ids of the checkpoints that requests began from


class Promises:
    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.num_shared = 0  # pages that requests began from while they were promised
        self._by_step: dict[int, dict[int, Promise]] = {}  # promises by step, then writer
        self._of_page: dict[PageKey, Promise] = {}
        self._of_state: dict[bytes, Promise] = {}

    def __bool__(self) -> bool:
        return bool(self._by_step)

    # Making a batch

    def add_page(self, step: int, writer: int, key: PageKey, page: int, content: PageContent | None = None) -> None:
        """Let other requests find a page that the step will certainly fill, unless a page with this key is published or
        promised already. `content`: for the record of cache events, if there is one."""
        if key in self._of_page or self.pool.find(key) is not None:
            return
        promise = self._open(step, writer)
        self.pool.hold(page)
        promise.pages[key] = page
        if content is not None:
            promise.contents[key] = content
        self._of_page[key] = promise

    def add_state(self, step: int, checkpoint: Checkpoint, digest: bytes) -> None:
        """Let other requests find a recurrent state that the step will certainly write to the checkpoint's pages,
        unless a state of the same tokens is promised already."""
        known = self._of_state.get(digest)
        if known is not None and known.states[digest].is_open:
            return
        promise = self._open(step, checkpoint.request_id)
        promise.states[digest] = checkpoint
        self._of_state[digest] = promise

    # Looking

    def find_page(self, key: PageKey, before: int) -> int | None:
        """Return the page that a step earlier than `before` has promised to fill for this key; None if there is
        none."""
        promise = self._of_page.get(key)
        return promise.pages[key] if promise is not None and promise.step < before else None

    def find_state(self, digest: bytes, before: int) -> Checkpoint | None:
        """Return the checkpoint that a step before `before` writes after the tokens of this digest; None if there is
        none."""
        promise = self._of_state.get(digest)
        if promise is None or promise.step >= before or not promise.states[digest].is_open:
            return None
        return promise.states[digest]

    def writer_in(self, step: int, key: PageKey) -> int | None:
        """Return the request that fills the page of this key in this step; None if there is none."""
        promise = self._of_page.get(key)
        return promise.writer if promise is not None and promise.step == step else None

    def held(self) -> list[int]:
        """Return all pages that promises hold. A page that several promises hold occurs several times."""
        return [page for promise in self._all() for page in promise.pages.values()]

    # Sharing

    def share_page(self, request_id: int, key: PageKey) -> None:
        """Let the request begin from the page of this key, if the page is promised."""
        promise = self._of_page.get(key)
        if promise is not None:
            promise.sharers.add(request_id)
            self.num_shared += 1

    def share_state(self, request_id: int, digest: bytes) -> None:
        promise = self._of_state[digest]
        promise.sharers.add(request_id)
        promise.shared_states.add(promise.states[digest].id)

    def leave(self, request_id: int) -> None:
        """Remove the request from the sharers of all promises. Called when the request gives up its row."""
        for promise in self._all():
            promise.sharers.discard(request_id)

    # Settling

    def settle(self, step: int, failed: Collection[int], written: Collection[int]) -> set[int]:
        """Publish or break the promises of a step whose result has come. `failed`: requests whose values are not
        finite; `written`: ids of the checkpoints that the step wrote. Returns the requests that shared a broken
        promise and must start again."""
        made = self._by_step.get(step)
        if made is None:
            return set()
        broken = [p for p in made.values() if p.writer in failed or not p.shared_states <= set(written)]
        restarting = self._break(broken) if broken else set()
        for promise in self._by_step.pop(step, {}).values():
            for key, page in promise.pages.items():
                self.pool.publish(page, key, promise.contents.get(key))
            self._erase(promise)
        return restarting

    def erase_all(self) -> None:
        """Withdraw all promises after a failed step: their pages are freed and not published, because what the step
        wrote to them is unknown. All requests lose their rows then, so none uses these pages any longer."""
        for promise in self._all():
            self._erase(promise)
        self._by_step.clear()

    def check_integrity(self, running: Collection[int]) -> None:
        pages = {key for promise in self._all() for key in promise.pages}
        assert pages == self._of_page.keys(), "a promised page is lost"
        states = {digest for promise in self._all() for digest in promise.states}
        assert states == self._of_state.keys(), "a promised state is lost"
        for promise in self._all():
            assert promise.sharers <= set(running), "a request without a row shares a promise"

    # Inside

    def _all(self) -> list[Promise]:
        return [promise for made in self._by_step.values() for promise in made.values()]

    def _open(self, step: int, writer: int) -> Promise:
        return self._by_step.setdefault(step, {}).setdefault(writer, Promise(step, writer))

    def _break(self, broken: Iterable[Promise]) -> set[int]:
        """Erase these promises, later promises of the same writers, and all promises that depend on erased ones.
        Returns the requests that shared an erased promise."""
        restarting: set[int] = set()
        waiting = list(broken)
        while waiting:
            promise = waiting.pop()
            if self._by_step.get(promise.step, {}).pop(promise.writer, None) is None:
                continue  # broken already
            self._erase(promise)
            restarting |= promise.sharers
            writers = {promise.writer, *promise.sharers}
            waiting += [p for p in self._all() if p.writer in writers and p.step >= promise.step]
        self._by_step = {step: made for step, made in self._by_step.items() if made}
        return restarting

    def _erase(self, promise: Promise) -> None:
        for key in promise.pages:
            del self._of_page[key]
        for digest in promise.states:
            if self._of_state.get(digest) is promise:
                del self._of_state[digest]
        for page in reversed(promise.pages.values()):  # tails are evicted first
            self.pool.free(page)
