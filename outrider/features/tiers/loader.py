"""Loader: a thread that reads pages from host memory or disk into host buffers. No torch.

The thread never touches the device's pages: the step that follows copies the buffers. So a load that was cancelled, or
given up because it took too long, can write nothing, and a slow disk holds up no step. A place that does not answer
keeps its thread and its buffer for itself: another thread goes on without this place.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from outrider.core.page_moves import PageLoad, ReadTime
from outrider.features.tiers.medium import Lease, LendsBytes, PageMedium
from outrider.features.tiers.place_health import PlaceHealth

log = logging.getLogger("outrider")
CLOSE_SECONDS = 10.0
HANG_SECONDS = 5.0  # in which a place must have read a page
MOST_STAGED = 256 << 20  # bytes of pages that were read and not copied yet
NO_BYTES = memoryview(b"")


class StagedPage(NamedTuple):
    """A page that was read, or that did not come."""

    load: int
    position: int  # in its load
    page: int
    data: memoryview
    place: str | None  # None: it did not come, and `data` is undefined
    is_asked: bool = True  # False: not all places were asked in time, so the page may still lie in one
    lease: Lease | None = None  # of `data`, if the place has lent it


class PlaceAnswer(NamedTuple):
    """What a place says when it is asked for a page."""

    is_found: bool = False
    data: memoryview = NO_BYTES  # a buffer of the loader, or what the place has lent
    lease: Lease | None = None


class BegunLoad:
    """A load of which pages are still to be read."""

    def __init__(self, order: PageLoad, now: float) -> None:
        self.order, self.until = order, now + order.patience
        self.num_staged = 0
        self.is_over = False  # cancelled, or out of time

    @property
    def is_done(self) -> bool:
        return self.is_over or self.num_staged == len(self.order.pages)


class Reader:
    """A thread of the loader, and the question that it waits for."""

    def __init__(self) -> None:
        self.place = ""
        self.since: float | None = None  # None: it does not wait for a place
        self.is_given_up = False  # then it ends without another deed


class Loader:
    def __init__(self, media: Sequence[PageMedium], page_bytes: int, make_buffer: Callable[[int], memoryview]) -> None:
        """make_buffer: function that makes a host buffer of a given size, such as a pinned one."""
        self._media, self._page_bytes, self._make_buffer = media, page_bytes, make_buffer
        self._health = {medium.name: PlaceHealth() for medium in media}
        self._most_staged = max(1, MOST_STAGED // page_bytes)
        self._changed = threading.Condition()
        self._open: deque[BegunLoad] = deque()
        self._staged: list[StagedPage] = []
        self._free: list[memoryview] = []  # buffers to use again
        self._read_times: list[ReadTime] = []  # since they were taken
        self._reader: Reader | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def begin(self, loads: Sequence[PageLoad]) -> None:
        now = time.monotonic()
        with self._changed:
            self._open += [BegunLoad(load, now) for load in loads]
            if loads and self._reader is None:
                self._start_reader()
            self._changed.notify_all()

    def cancel(self, loads: Sequence[int]) -> None:
        """Forget these loads: none of their pages is returned from now on."""
        with self._changed:
            cancelled = set(loads)
            for load in self._open:
                load.is_over |= load.order.id in cancelled
            for staged in self._staged:
                if staged.load in cancelled:
                    self.give_back(staged)
            self._staged = [staged for staged in self._staged if staged.load not in cancelled]
            self._changed.notify_all()

    def take(self, wait_seconds: float = 0.0) -> list[StagedPage]:
        """Return the pages that were read since the last call, and those of loads that are out of time. Waits until
        nothing more can be read before this call returns."""
        with self._changed:
            if wait_seconds:
                self._changed.wait_for(self._is_at_rest, wait_seconds)
            self._watch(time.monotonic())
            staged, self._staged = self._staged, []
            self._changed.notify_all()
            return staged

    def take_read_times(self) -> list[ReadTime]:
        """The time that each place took to read pages since the last call."""
        with self._changed:
            times, self._read_times = self._read_times, []
            return times

    def rests(self) -> dict[str, float]:
        """The places that are left alone, and for how many seconds."""
        now = time.monotonic()
        with self._changed:
            return {name: seconds for name, own in self._health.items() if (seconds := own.rest(now)) > 0}

    def give_back(self, staged: StagedPage) -> None:
        """Use a page's buffer again, which was copied, or return it to the place that has lent it."""
        if staged.lease is not None:
            staged.lease.end()
        elif len(staged.data):
            self._free.append(staged.data)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)  # it may wait for a place that does not answer

    # With the lock

    def _is_at_rest(self) -> bool:
        return len(self._staged) >= self._most_staged or all(load.is_done for load in self._open)

    def _start_reader(self) -> None:
        self._reader = Reader()
        self._thread = threading.Thread(target=self._run, args=(self._reader,), name="outrider-loader", daemon=True)
        self._thread.start()

    def _watch(self, now: float) -> None:
        """Give up loads that are out of time, and a place that does not answer."""
        for load in self._open:
            if now > load.until and not load.is_done:
                load.is_over = True
                rest = list(enumerate(load.order.pages))[load.num_staged:]
                self._staged += [StagedPage(load.order.id, index, page, NO_BYTES, None, is_asked=False)
                                 for index, (page, _) in rest]
        reader = self._reader
        if reader is not None and reader.since is not None and now > reader.since + HANG_SECONDS:
            log.warning("cache place %s does not answer: it is left alone for a while", reader.place)
            reader.is_given_up = True
            self._health[reader.place].hang(now)
            self._start_reader()

    # In the thread

    def _run(self, reader: Reader) -> None:
        while (load := self._next(reader)) is not None:
            self._stage(reader, load, self._read(reader, load))

    def _next(self, reader: Reader) -> BegunLoad | None:
        """Wait until another page may be read, and return its load."""
        with self._changed:
            while not (self._is_closed or reader.is_given_up):
                while self._open and self._open[0].is_done:
                    self._open.popleft()
                if self._open and len(self._staged) < self._most_staged:
                    return self._open[0]
                self._changed.wait()
            return None

    def _stage(self, reader: Reader, load: BegunLoad, staged: StagedPage) -> None:
        with self._changed:
            if reader.is_given_up:
                return  # the page was given up, or another thread has read it
            if load.is_over:
                self.give_back(staged)
                return
            load.num_staged += 1
            self._staged.append(staged)
            self._changed.notify_all()

    def _read(self, reader: Reader, load: BegunLoad) -> StagedPage:
        """Read the next page of a load from the first place that has its key."""
        page, key = load.order.pages[load.num_staged]
        missing = StagedPage(load.order.id, load.num_staged, page, NO_BYTES, None)
        for medium in self._media:
            if not self._begin_asking(reader, medium.name):
                missing = missing._replace(is_asked=False)
                continue
            began, answer, error = time.monotonic(), PlaceAnswer(), None
            try:
                answer = self._ask(medium, key)
            except Exception as raised:  # whatever a place fails of, it is a miss
                log.exception("%s: a page could not be read", medium.name)
                error = raised
            read = missing._replace(place=medium.name, data=answer.data, lease=answer.lease)
            if not self._end_asking(reader, medium.name, began, answer.is_found, error):
                if answer.lease is not None:
                    answer.lease.end()
                return missing
            if answer.is_found:
                return read
            self.give_back(read)
        return missing

    def _ask(self, medium: PageMedium, key: bytes) -> PlaceAnswer:
        if not medium.contains(key):
            return PlaceAnswer()
        if isinstance(medium, LendsBytes):
            lease = medium.lend(key, self._page_bytes)
            answer = PlaceAnswer() if lease is None else PlaceAnswer(True, lease.data, lease)
        else:
            data = self._free.pop() if self._free else self._make_buffer(self._page_bytes)
            answer = PlaceAnswer(medium.load(key, data), data)
        if answer.is_found:
            medium.touch(key)
        return answer

    def _begin_asking(self, reader: Reader, name: str) -> bool:
        now = time.monotonic()
        with self._changed:
            if reader.is_given_up or self._health[name].rest(now) > 0:
                return False
            reader.place, reader.since = name, now
            return True

    def _end_asking(self, reader: Reader, name: str, began: float, is_found: bool, error: Exception | None) -> bool:
        """Note how a place has answered. Returns False if the thread was given up meanwhile."""
        now = time.monotonic()
        with self._changed:
            health = self._health[name]
            if reader.is_given_up:
                health.answer()
                return False
            reader.since = None
            if error is not None:
                health.fail(now)
            elif is_found:
                health.succeed()
                self._read_times.append(ReadTime(name, now - began))
            return True
