"""CacheWithMedia: a CacheManager that also stores pages outside the device, in host memory or on disk.

    published        a page's content is final: a copy is stored with the next batch
    evicted          a page that no other storage holds is copied there before its next user overwrites it
    on its way       a request begins with pages that only other storage holds: it waits, and others run
    arrived          all bytes were copied and verified: the pages are published, and the request finds them
    failed           the page is freed, its key is forgotten, and the request computes the tokens

A request never runs on a page whose bytes have not arrived. This file is imported only if an engine has other
storage."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from outrider.cache.events import DIGEST_BYTES, PageRemoved
from outrider.cache.groups import CacheLayout
from outrider.cache.load_choice import LoadChoice
from outrider.cache.manager import CacheManager, CacheStats, Start
from outrider.cache.media import MediaStats, PageMedia
from outrider.cache.media_lookup import MarkedCheckpoints, WideLookup
from outrider.cache.observed_pool import Arrival, ObservedPool, PageQueue, Pending, WantedPage
from outrider.cache.pages import PageKey
from outrider.cache.sessions import CacheSession, CacheSessions
from outrider.core import Limits, PageChanges, Settled, StepResult
from outrider.core.feature_parts import Figure, find_part
from outrider.core.input_part import NO_INPUTS, InputParts
from outrider.core.page_moves import LoadedPages, PageLoad, PageMoves

MOST_LOADS = 3  # of one request: what was loaded may be evicted again before the request starts
LOAD_PATIENCE = 10.0  # seconds that a load may take, beside those that computing the tokens would take
_load_ids = count(1)  # unique in a process: a worker may still carry out a load of an earlier scheduler


class News(enum.Enum):
    ASKED = "the request waits for a report of what other engines have stored"
    TOLD = "a report has come since it asked"


@dataclass(slots=True)
class StatsWithMedia(CacheStats):
    media: MediaStats = field(default_factory=MediaStats)

    def figures(self) -> tuple[Figure, ...]:
        return self.media.figures()


class CacheWithMedia(CacheManager):
    outlives_sleep = True
    pool: ObservedPool

    def __init__(self, layout: CacheLayout, pool: ObservedPool, limits: Limits, *, enable_prefix_caching: bool = True,
                 lookahead: int = 0, sessions: CacheSessions | None = None) -> None:
        super().__init__(layout, pool, limits, enable_prefix_caching=enable_prefix_caching, lookahead=lookahead)
        self.sessions = sessions or CacheSessions(0)
        self._session_of: dict[int, CacheSession] = {}  # by request
        self.queue, self.media = pool.queue, pool.queue.media
        self.checkpoints = self._marked = MarkedCheckpoints(self.states, len(self.groups), pool, limits)
        self.lookup.checkpoints = self.checkpoints
        self.lookup = self._wide = WideLookup(layout, self.lookup, self.media, has_lookahead=lookahead > 0)
        self.stats = self._stats = StatsWithMedia(media=self.media.stats)
        pool.arriving = self._pending = Pending()
        self._waits_for: dict[int, int] = {}  # request to load
        self._num_loads: dict[int, int] = {}  # by request
        self._unsent: list[PageLoad] = []
        self._cancelled: list[int] = []
        self._asks_news = False
        self._news: dict[int, News] = {}  # by request
        self._computed: dict[int, int] = {}  # by request: prompt tokens that were scheduled, or found
        self.choice = LoadChoice()

    # Looking up

    def find_start(self, request_id: int, token_ids: Sequence[int], keys: tuple[str, ...] = (), *,
                   use_prefix: bool = True, inputs: InputParts = NO_INPUTS, step: int | None = None) -> Start:
        """Look up a request's cached prefix. If other places hold more of it than the device, begin to load that, and
        have the request wait."""
        session = find_part(inputs, CacheSession)
        if session is not None:
            self._session_of[request_id] = session
        reads_cache = self.enable_prefix_caching and use_prefix
        if request_id in self._waits_for or reads_cache and self.media.keeps_waiting:
            return Start(token_ids, 0, 0, 0, must_wait=True)
        start = super().find_start(request_id, token_ids, keys, use_prefix=use_prefix, inputs=inputs, step=step)
        if not reads_cache or start.must_wait or not self.can_start(start):
            return start
        return replace(start, must_wait=self._waits(request_id, token_ids, inputs, start.hit))

    def _waits(self, request_id: int, token_ids: Sequence[int], inputs: InputParts, hit: int) -> bool:
        """Whether the request should wait for pages from other storage. If so, their load has begun."""
        if not self.media.is_open or self._num_loads.get(request_id, 0) >= MOST_LOADS:
            return False
        self.media.leave_alone({})  # rests may have ended since the last report
        reach = self._wide.reach(request_id, token_ids, inputs)
        if len(token_ids) - reach > self._smallest_page and self._waits_for_news(request_id):
            return True
        if reach <= hit:
            return False
        arrival = self._plan(request_id, token_ids, reach)
        coming = {wanted.key: load for load, other in self._pending.loads.items() for wanted in other.wanted}
        for key in [wanted.key for wanted in arrival.wanted]:
            if key in coming:  # another request has asked for it
                self._pending.loads[coming[key]].requests.add(request_id)
                self._waits_for[request_id] = coming[key]
                self.media.stats.num_waits += 1
                return True
        why_not = self._why_not(arrival, reach - hit)
        if why_not is not None:
            self.media.stats.num_unloaded[why_not] += 1
            self._num_loads[request_id] = MOST_LOADS
            return False
        self._load(request_id, arrival, LOAD_PATIENCE + self.choice.compute_seconds(reach - hit))
        return True

    def _waits_for_news(self, request_id: int) -> bool:
        """Whether the request waits to hear what other engines have stored. It asks once at most: the next report may
        take longer than news are new."""
        if request_id not in self._news and self.media.has_old_news:
            self._news[request_id] = News.ASKED
            self._asks_news = True
        return self._news.get(request_id) is News.ASKED

    def _why_not(self, arrival: Arrival, num_tokens: int) -> str | None:
        """Why pages that would spare so many tokens are not loaded, in words for a metric."""
        new = len(arrival.wanted) + sum(not self.pool.is_held(page) for page in arrival.present)
        if new > self.pool.num_free or not arrival.wanted:
            return "no free pages"
        arrival.num_pages = Counter(map(self.media.place_of, [wanted.key for wanted in arrival.wanted]))
        before = sum([other.num_pages for other in self._pending.loads.values()], Counter[str]())
        return self.choice.why_not(num_tokens, arrival.num_pages, before)

    def _plan(self, request_id: int, token_ids: Sequence[int], reach: int) -> Arrival:
        """Find the pages of a prefix, last page first: those that are cached here, and those to load from other
        storage. Pages of a drafter's group may be missing."""
        arrival = Arrival({request_id}, [], [], [])
        for group in self._freed_in_order:
            count_ = reach // group.page_tokens
            digests = self.lookup.digests(request_id, group.page_tokens, token_ids, count_)
            for column in range(count_ - 1, group.kind.first_needed(reach) - 1, -1):
                page_key = group.index, digests[column]
                page, key = self.pool.find(page_key), self.media.key_of(*page_key)
                if page is not None:
                    arrival.present.append(page)
                elif self.media.has(key):
                    content = self.lookup.content(request_id, group, column, token_ids)
                    arrival.wanted.append(WantedPage(key, group.index, page_key, content))
                else:
                    assert not group.is_target, "the reach names a page that no place has"
                    break
        if self.layout.recurrent.layers:
            digest = self.lookup.digest_at(request_id, token_ids)(reach)
            state = self.states.find(digest)
            if state is not None:
                arrival.present += state
            else:
                arrival.digest = digest
                arrival.wanted += [WantedPage(key, len(self.groups), None) for key in self._wide.state_keys(digest)]
        return arrival

    def _load(self, request_id: int, arrival: Arrival, patience: float) -> None:
        for page in arrival.present:  # first: what is held is not evicted
            self.pool.hold(page)
        arrival.pages = [self.pool.allocate(wanted.group, is_overwritten=True) for wanted in arrival.wanted]
        load = next(_load_ids)
        self._pending.loads[load] = arrival
        self._waits_for[request_id] = load
        self._num_loads[request_id] = self._num_loads.get(request_id, 0) + 1
        self.media.stats.num_loads += 1
        keys = [wanted.key for wanted in arrival.wanted]
        self._unsent.append(PageLoad(load, tuple(zip(arrival.pages, keys, strict=True)), patience))

    def admit(self, request_id: int, row: int, start: Start) -> int:
        self._num_loads.pop(request_id, None)
        self._news.pop(request_id, None)
        self._computed[request_id] = start.hit
        if request_id in self._session_of:
            found = self._pages_of_prefix(request_id, start.token_ids, start.hit)
            self.sessions.begin(self._session_of[request_id], found.keys())
        return super().admit(request_id, row, start)

    def promise(self, step: int, request_id: int, token_ids: Sequence[int], end: int) -> None:
        self.choice.schedule_tokens(step, end - self._computed[request_id])
        self._computed[request_id] = end
        super().promise(step, request_id, token_ids, end)

    # Sessions

    def retire(self, request_id: int, token_ids: Sequence[int], settled: Settled, folded: int, *,
               is_exact: bool) -> None:
        super().retire(request_id, token_ids, settled, folded, is_exact=is_exact)
        session = self._session_of.get(request_id)
        if session is not None and self.enable_prefix_caching and not self._requests[request_id].is_mixed:
            pages = self._pages_of_prefix(request_id, token_ids, settled.at_least)
            self.sessions.extend(session, pages, self.media.is_stored)

    def drop_session(self, session: CacheSession) -> bool:
        """Delete the pages of a session's last turn. Returns False if no session has this name."""
        pages = self.sessions.drop(session, self.media.is_stored)
        for key in pages or ():
            for name in self.media.remove(key):
                self._tell_removed(name, [key])
        self.pool.forget_pages(page_key for page_key in (pages or {}).values() if page_key is not None)
        return pages is not None

    def _pages_of_prefix(self, request_id: int, token_ids: Sequence[int], length: int) -> dict[bytes, PageKey | None]:
        """The pages and the state that a request needs to begin after the last page boundary of a prefix, by their keys
        in other places, the last ones first."""
        sizes = [group.page_tokens for group in self.groups]
        size = max([*sizes, self.layout.recurrent.page_tokens] if self.layout.recurrent.layers else sizes)
        reach = length // size * size
        found: list[tuple[int, bytes, PageKey | None]] = []
        for group in self.groups if reach else ():
            digests = self.lookup.digests(request_id, group.page_tokens, token_ids, reach // group.page_tokens)
            for column in range(group.kind.first_needed(reach), reach // group.page_tokens):
                page_key = group.index, digests[column]
                found.append((column * group.page_tokens, self.media.key_of(*page_key), page_key))
        if reach and self.layout.recurrent.layers:
            digest = self.lookup.digest_at(request_id, token_ids)(reach)
            found += [(reach, key, None) for key in self._wide.state_keys(digest)]
        found.sort(key=lambda each: -each[0])
        return {key: page_key for _, key, page_key in found}

    # Batches

    @property
    def has_orders(self) -> bool:
        pending = self._pending
        awaits = pending.loads or pending.num_stores or self.media.keeps_waiting
        return bool(super().has_orders or self.queue or self._unsent or self.sessions.has_orders or self._asks_news
                    or awaits and not pending.num_batches)

    def take_changes(self) -> PageChanges:
        changes, pending = super().take_changes(), self._pending
        stores = self.queue.take(self.pool)
        is_opening = self.media.is_opening
        orders = self.sessions.take_orders()
        if stores or self._cancelled or pending.loads or pending.num_stores or is_opening or orders or self._asks_news:
            changes.moves = PageMoves(stores, self._unsent, is_opening, self._cancelled, orders.pins, orders.dropped,
                                      self._asks_news)
            self._unsent, self._cancelled, self._asks_news = [], [], False
            pending.num_batches += 1
            pending.num_stores += len(stores)
        return changes

    def settle_moves(self, result: StepResult) -> None:
        self.choice.end_step(result.step)
        report = result.moved
        if report is None:
            return
        self._pending.num_batches -= 1
        if report.opened is not None:
            self.media.open(report.opened)
        self.media.take_news(report.found, is_shared=report.is_shared)
        self._news = dict.fromkeys(self._news, News.TOLD)
        forgotten = min(self._pending.num_forgotten, len(report.stored))
        self._pending.num_forgotten -= forgotten
        self._pending.num_stores = max(0, self._pending.num_stores - len(report.stored))  # some may precede a failure
        for key, places in report.stored[forgotten:]:
            self.media.add(key, places)
            self._tell_stored(key, places)
            if places:
                self.sessions.note_stored(key)
        for name, keys in report.evicted:
            self._tell_removed(name, self.media.evict(name, keys))
        self.media.leave_alone(report.rests)
        self.media.stats.reasons.update(report.reasons)
        self.choice.observe_reading(report.read_times)
        for loaded in report.loaded:
            self._arrive(loaded)

    def _tell_stored(self, key: bytes, places: Sequence[str]) -> None:
        """Record a cache event for each storage that has stored the page, if events are recorded."""
        stored = self.queue.told.pop(key, None)
        if stored is not None and self.pool.events is not None:
            for name in places:
                self.pool.events.store_page(*stored, medium=name)

    def _tell_removed(self, name: str, keys: Sequence[bytes]) -> None:
        events = self.pool.events
        if events is None:
            return
        for key in keys:
            group = self.media.group_of(key)
            if group is not None and group < len(self.groups) and self.groups[group].is_target:
                events.add(PageRemoved(group, key[:DIGEST_BYTES], name))

    def _arrive(self, loaded: LoadedPages) -> None:
        """Publish those pages of a load that were filled, and free all of them: they are cached as the most recently
        used, and the requests that waited look them up again."""
        arrival = self._pending.loads.pop(loaded.id, None)
        if arrival is None:
            return  # cancelled meanwhile
        state: list[int] = []
        failed: list[int] = []
        for wanted, page, place in zip(arrival.wanted, arrival.pages, loaded.places, strict=True):
            if place is None:
                failed.append(page)
                if loaded.is_late:
                    continue  # it may still lie there
                for name in self.media.remove(wanted.key):
                    self._tell_removed(name, [wanted.key])
                self.media.stats.num_failed += 1
                continue
            self.media.stats.num_loaded[place] += 1
            if wanted.page_key is None:
                state.append(page)
            else:
                self.pool.publish(page, wanted.page_key, wanted.content)
        if state and len(state) == len(self._wide.state_keys(arrival.digest)):
            self.states.publish(arrival.digest, self._marked.next_id(), state)
        else:
            failed += state  # without its other pages a state is nothing
        if not failed:
            self.choice.observe_load(arrival.began, arrival.num_pages)
        if loaded.is_late:
            self.media.stats.num_unloaded["too late"] += 1
            self._num_loads.update(dict.fromkeys(arrival.requests, MOST_LOADS))  # they have waited for long enough
        self._release(arrival, failed)

    def _release(self, arrival: Arrival, unwritten: Sequence[int]) -> None:
        for page in arrival.held:
            self.pool.free(page)
        if unwritten:
            self.pool.mark_unclean(unwritten)
        for request_id in arrival.requests:
            del self._waits_for[request_id]

    def _cancel_loads(self) -> None:
        """Free the pages of all loads. The next batch tells the worker before their pages are used again."""
        self._cancelled += self._pending.loads
        for arrival in self._pending.loads.values():
            self._release(arrival, arrival.pages)
        self._pending.loads.clear()
        self._unsent.clear()

    # Forgetting

    def forget_unsettled(self, changes: Sequence[PageChanges]) -> None:
        self._cancel_loads()
        self.queue.clear()
        self.choice.forget_steps()
        self._news = dict.fromkeys(self._news, News.TOLD)  # the report may be lost
        cancelled, self._cancelled = self._cancelled, []
        super().forget_unsettled(changes)
        self.pool.arriving = self._pending = Pending()
        self._cancelled = cancelled

    def use_weights(self, version: int) -> None:
        self._cancel_loads()
        self.queue.clear()
        super().use_weights(version)
        self.media.use_weights(version)
        self.sessions.forget()

    def forget_cached(self) -> bool:
        """Forget the pages that no request holds, on the device and in all other storage."""
        self._cancel_loads()
        self.queue.clear()
        self.media.forget()
        self.sessions.forget()
        self._pending.num_forgotten = self._pending.num_stores
        return super().forget_cached()

    def forget(self, request_id: int) -> None:
        super().forget(request_id)
        self._num_loads.pop(request_id, None)
        self._session_of.pop(request_id, None)
        self._computed.pop(request_id, None)
        self._news.pop(request_id, None)
        load = self._waits_for.pop(request_id, None)
        if load is not None:
            self._pending.loads[load].requests.discard(request_id)

    # Looking

    def check_integrity(self) -> None:
        super().check_integrity()
        waiting = {request: load for load, own in self._pending.loads.items() for request in own.requests}
        assert waiting == self._waits_for, "a request waits for pages that are not on their way"
        for arrival in self._pending.loads.values():
            assert len(arrival.pages) == len(arrival.wanted), "a page on its way has no place"


def add_media(plain: CacheManager, media: PageMedia, sessions: CacheSessions | None = None) -> CacheWithMedia:
    """Make an empty cache like `plain`, whose pages also lie in other places."""
    if isinstance(plain, CacheWithMedia):
        raise ValueError("two features store cached pages outside the device, and only one may: start the engine "
                         "without one of them")
    media.stats.page_bytes = plain.layout.page_bytes
    if sessions is not None:
        sessions.page_bytes = plain.layout.page_bytes
    pool = ObservedPool(plain.pool.num_pages, PageQueue(media, state_group=len(plain.groups)))
    return CacheWithMedia(plain.layout, pool, plain.limits, enable_prefix_caching=plain.enable_prefix_caching,
                          lookahead=plain.lookahead, sessions=sessions)
