"""Random schedules of an engine whose pages also lie in other places, which lose, refuse and spoil them at random."""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, NamedTuple

from outrider.cache.groups import CacheLayout
from outrider.cache.manager import CacheManager
from outrider.cache.media import PageMedia
from outrider.cache.observed_pool import ObservedPool, PageQueue
from outrider.cache.sessions import CacheSession, CacheSessions
from outrider.cache.with_media import CacheWithMedia
from outrider.core import ScheduledBatch, StepResult
from outrider.core.page_moves import LoadedPages, MovesReport, OpenedPlaces, PageLoad, PageMoves
from tests.unit.hash_mixer import POISON, HashMixerRunner
from tests.unit.schedule_driver import Driver, Scenario, WatchedPool


class Content(NamedTuple):
    cells: tuple[int, ...]
    group: int
    is_filled: bool


@dataclass
class Place:
    """Forgets its oldest pages without a word when it is full."""

    name: str
    capacity: int
    pages: OrderedDict[bytes, Content] = field(default_factory=OrderedDict)

    def store(self, key: bytes, content: Content, *, is_unique: bool) -> None:
        """is_unique: no slot can be missing, as some of a drafter's can."""
        known = self.pages.get(key, content)
        assert known[:2] == content[:2] or not is_unique, f"two pages have one key: {known} and {content}"
        self.pages[key] = content
        while len(self.pages) > self.capacity:
            self.pages.popitem(last=False)


@dataclass
class Faults:
    refused: float = 0.0  # share of stores
    lost: float = 0.0  # of loads
    latest: int = 0  # steps that a load may take
    late: float = 0.0  # share of loads that are given up, of which some pages have come
    resting: float = 0.0  # share of reports that say that a place is left alone
    named: float = 0.0  # share of requests with a session
    told: float = 0.0  # share of reports with pages that others have stored, known ones too


@dataclass
class Coming:
    load: PageLoad
    steps: int


class MediaRunner(HashMixerRunner):
    """The device and the places, whose pages outlive it."""

    places: Sequence[Place]
    domain: bytes
    faults: Faults
    chance: Random

    def begin(self, places: Sequence[Place], domain: bytes, faults: Faults, chance: Random) -> None:
        self.places, self.domain, self.faults, self.chance = places, domain, faults, chance
        self.coming: list[Coming] = []
        self.moved: Counter[str] = Counter()

    def step(self, batch: ScheduledBatch, blank_pages: Sequence[int]) -> StepResult:
        """Pages are stored first, because the batch may overwrite them; loaded ones come whenever they come."""
        moves = batch.cache.pages.moves
        if moves is None:
            return super().step(batch, blank_pages)
        report = MovesReport()
        self._store(moves, report)
        result = super().step(batch, blank_pages)
        self.coming = [own for own in self.coming if own.load.id not in moves.cancelled]
        self.moved["cancelled"] += len(moves.cancelled)
        self.coming += [Coming(load, self.chance.randint(0, self.faults.latest)) for load in moves.loads]
        for key in moves.dropped:
            self.moved["dropped"] += sum(place.pages.pop(key, None) is not None for place in self.places)
        self.moved["pinned"] += sum(len(pin.keys) for pin in moves.pins if pin.until)
        for own in self.coming:
            own.steps -= 1
            if own.steps < 0:
                report.loaded.append(self._end(own.load))
        self.coming = [own for own in self.coming if own.steps >= 0]
        self._tell(report)
        if moves.asks_places:
            report.opened = OpenedPlaces(self.domain, {place.name: list(place.pages) for place in self.places})
        return replace(result, moved=report)

    def _end(self, load: PageLoad) -> LoadedPages:
        is_late = self.chance.random() < self.faults.late
        self.moved["late"] += is_late
        places = [self._miss(page) if is_late and self.chance.random() < 0.5 else self._load(page, key)
                  for page, key in load.pages]
        return LoadedPages(load.id, tuple(places), is_late)

    def _tell(self, report: MovesReport) -> None:
        report.is_shared = True
        if self.chance.random() < self.faults.resting:
            report.rests = {self.chance.choice(self.places).name: self.chance.choice([1e-4, 1e-2])}
            self.moved["rests"] += 1
        if self.chance.random() < self.faults.told:
            place = self.chance.choice(self.places)
            report.found = [(place.name, self.chance.sample(list(place.pages), min(9, len(place.pages))))]
            self.moved["told"] += 1

    def _miss(self, page: int) -> None:
        self._fill(page, POISON)
        self.moved["failed"] += 1

    def _store(self, moves: PageMoves, report: MovesReport) -> None:
        for page, key, _ in moves.stores:
            group = self._group_of[page]
            size = self.groups[group].page_tokens if group < len(self.groups) else None  # None: a recurrent state
            content = Content(tuple(self._cells[page][:size]), group, self._is_filled[page])
            is_whole = all(value >= 0 for value in content.cells)
            is_targets = group >= len(self.groups) or self.groups[group].is_target
            assert is_whole or not is_targets, f"page {page} is stored, and holds {content.cells}"
            took = [place for place in self.places if self.chance.random() >= self.faults.refused]
            for place in took:
                place.store(key, content, is_unique=is_targets)
            self.moved["stored"] += len(took)
            report.stored.append((key, tuple(place.name for place in took)))

    def _load(self, page: int, key: bytes) -> str | None:
        """Whoever reads a page that a load has spoilt is wrong."""
        for place in self.places:
            content = place.pages.get(key)
            if content is not None and self.chance.random() >= self.faults.lost:
                self._cells[page][: len(content.cells)] = content.cells
                self._group_of[page], self._is_filled[page] = content.group, content.is_filled
                self.moved[place.name] += 1
                return place.name
        self._miss(page)
        return None


class WatchedMediaPool(WatchedPool, ObservedPool):
    def __init__(self, num_pages: int, queue: PageQueue) -> None:
        ObservedPool.__init__(self, num_pages, queue)
        self._count, self._fresh = Counter(), []


class MediaDriver(Driver):
    """The places are those of all schedules, so engines find pages of engines before them."""

    device: MediaRunner
    cache: CacheWithMedia

    def __init__(self, scenario: Scenario, places: Sequence[Place], faults: Faults, disturb_rate: float = 0.0) -> None:
        self._places, self._faults, self._disturb_rate = places, faults, disturb_rate
        super().__init__(scenario)

    def _make_cache(self, layout: CacheLayout, num_pages: int) -> tuple[WatchedPool, CacheManager]:
        self.media = PageMedia([place.name for place in self._places])
        pool = WatchedMediaPool(num_pages, PageQueue(self.media, len(layout.groups)))
        return pool, CacheWithMedia(layout, pool, self.limits, lookahead=self.scenario.lookahead,
                                    enable_prefix_caching=self.scenario.prefix_caching,
                                    sessions=CacheSessions(self.scenario.seed % 100))

    def _make_request(self, index: int) -> None:
        super()._make_request(index)
        request, chance = self.requests[-1], Random(self.scenario.seed + index)
        if chance.random() < self._faults.named:
            session = CacheSession(chance.choice("ab"), str(chance.randrange(2)))
            request.input = request.input.with_part(session)

    def _make_device(self, layout: CacheLayout, num_pages: int) -> HashMixerRunner:
        device = MediaRunner(layout.groups, num_pages, self.limits, self.rng, lookahead=self.scenario.lookahead,
                             has_state=self.scenario.state_pages > 0)
        domain = hashlib.sha256(repr(layout).encode()).digest()
        device.begin(self._places, domain, self._faults, Random(self.scenario.seed))
        return device

    @property
    def most_turns(self) -> int:
        return 10 * super().most_turns * (1 + self._faults.latest)

    def _disturb(self) -> None:
        super()._disturb()
        if self.rng.random() >= self._disturb_rate:
            return
        while self._steps:
            self._read_result()
        match self.rng.randrange(4):
            case 0:
                self.cache.forget_cached()
            case 1:  # as before memory sleeps
                self.scheduler.preempt_all()
                self.cache.forget_all()
                self.counts["rests while pages come"] += bool(self.device.coming)
            case 2:
                self.scheduler.preempt_all()
            case _:
                self._drop_session()

    def _drop_session(self) -> None:
        sessions = self.cache.sessions
        if sessions._sessions:
            key = self.rng.choice(sorted(sessions._sessions))
            pages = dict(sessions._sessions[key].pages)
            found = sessions._sessions[key].found
            held = {name for other, own in sessions._sessions.items() if other != key for name in own.pages}
            assert self.cache.drop_session(CacheSession(*key)) and key not in sessions._sessions
            for name in pages:
                assert name in found or name in held or not self.media.is_stored(name), "a dropped page is found"

    def add_to(self, totals: Any) -> None:
        super().add_to(totals)
        totals.counts += Counter({f"pages {name}": number for name, number in self.device.moved.items()})
        totals.counts["waits for a load of another request"] += self.media.stats.num_waits
        totals.counts["loads"] += self.media.stats.num_loads
