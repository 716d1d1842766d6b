"""Places that hang: requests compute their prompts after a while, and what comes later is written nowhere."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from outrider.cache import load_choice, with_media
from outrider.core.page_moves import PageLoad
from outrider.features.tiers import loader as loader_module
from outrider.features.tiers import place_health
from outrider.features.tiers.loader import Loader, StagedPage
from outrider.features.tiers.place_health import PlaceHealth
from tests.engine.harness import Ask, Rig, greedy, prompt_of
from tests.features.disk_cases import object_files
from tests.tiers.rigs import KINDS, answers_of, asks_of, assert_equal, cached_of, stats_of
from tests.tiers.test_faults import FAMILIES, Gated, begin, cold, finish, place

__all__ = ["place"]  # a fixture
PAGE_BYTES = 64


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module, "HANG_SECONDS", 0.1)
    monkeypatch.setattr(with_media, "LOAD_PATIENCE", 0.4)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_place_that_hangs_holds_no_request(name: str, place: Gated, tmp_path: Path) -> None:
    """The place answers when its pages have been given to other requests, with wrong bytes."""
    kind = KINDS[name]
    asks = asks_of(kind, (70, 49, 66), max_tokens=12)
    expected = cold(kind, tmp_path, asks)
    with kind.open(tmp_path, num_pages=30) as rig:
        rig.run_one_by_one(asks)
        rig.engine.rest()
        place.gate.clear()
        place.is_wrong = True
        begin(rig, asks[0])
        outputs = finish(rig)
        assert_equal(answers_of([outputs["waiting"]]), expected[:1])
        assert stats_of(rig).num_unloaded == {"too late": 1} and not stats_of(rig).num_failed
        for name_, ask in zip("abc", asks, strict=True):
            rig.outputs.add(name_, ask.prompt, ask.params)
        for _ in range(4):
            rig.outputs.step()
        place.gate.set()  # while others run
        time.sleep(0.05)
        outputs = finish(rig)
        assert_equal(answers_of([outputs[each] for each in "abc"]), expected)
        assert stats_of(rig).num_loads == 1, "a place that hung is asked again at once"


def test_a_place_is_asked_again_later(place: Gated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place_health, "REST_SECONDS", 0.3)
    kind = KINDS["full"]
    (ask,) = asks_of(kind, (70,))
    with kind.open(tmp_path) as rig:
        rig.run([ask])
        rig.engine.rest()
        place.gate.clear()
        begin(rig, ask)
        finish(rig)
        rig.engine.rest()
        place.gate.set()
        time.sleep(0.7)
        assert cached_of(rig.run([ask])) == [64], "the pages of a late load are forgotten"


def test_a_slow_load_is_given_up(place: Gated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each page comes in time, and all of them do not."""
    monkeypatch.setattr(with_media, "LOAD_PATIENCE", 0.2)
    kind = KINDS["full"]
    (ask,) = asks_of(kind, (90,))
    expected = cold(kind, tmp_path, [ask])
    with kind.open(tmp_path) as rig:
        rig.run([ask])
        rig.engine.rest()
        place.pause = 0.08
        outputs = rig.run([ask])
        assert_equal(answers_of(outputs), expected)
        assert stats_of(rig).num_unloaded == {"too late": 1}


@dataclass
class Stuck:
    """A place that answers when the test says so, and writes late."""

    name: str
    gate: threading.Event = field(default_factory=threading.Event)
    pages: tuple[bytes, ...] = ()
    byte: int = 1

    def contains(self, key: bytes) -> bool:
        return key in self.pages

    def load(self, key: bytes, into: memoryview) -> bool:
        assert self.gate.wait(20)
        into[:] = bytes([self.byte]) * len(into)
        return True

    def touch(self, key: bytes) -> None:
        pass


def wait_until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.005)


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    stuck = Stuck("stuck", pages=(b"a", b"b", b"c"))
    yield stuck
    stuck.gate.set()


def taken(loader: Loader, count: int) -> list[StagedPage]:
    found: list[StagedPage] = []

    def is_complete() -> bool:
        found.extend(loader.take(0.005))
        return len(found) >= count

    wait_until(is_complete)
    return found


def test_another_place_answers_for_one_that_hangs(stuck: Stuck) -> None:
    other = Stuck("other", pages=(b"a", b"b"), byte=2)
    other.gate.set()
    buffers: list[memoryview] = []

    def make_buffer(size: int) -> memoryview:
        buffers.append(memoryview(bytearray(size)))
        return buffers[-1]

    loader = Loader([stuck, other], PAGE_BYTES, make_buffer)  # type: ignore[list-item]
    loader.begin([PageLoad(1, ((7, b"a"), (8, b"c"), (9, b"b")), 5.0)])
    pages = taken(loader, 3)
    assert [(page.page, page.place, page.is_asked) for page in pages] == [
        (7, "other", False), (8, None, False), (9, "other", False)]
    assert list(loader.rests()) == ["stuck"]
    for page in pages:
        loader.give_back(page)
    loader.begin([PageLoad(2, ((5, b"b"),), 5.0)])
    (page,) = taken(loader, 1)
    assert bytes(page.data) == b"\2" * PAGE_BYTES
    held = page.data
    stuck.gate.set()  # the first thread writes what it was asked for
    wait_until(lambda: bytes(buffers[0]) == b"\1" * PAGE_BYTES)
    assert bytes(held) == b"\2" * PAGE_BYTES and not loader.take(), "a late page is written or returned"
    assert all(free is not buffers[0] for free in loader._free), "a buffer that is written late is used again"
    loader.close()


def test_a_load_whose_time_is_over_is_reported_once(stuck: Stuck) -> None:
    loader = Loader([stuck], PAGE_BYTES, lambda size: memoryview(bytearray(size)))  # type: ignore[list-item]
    loader.begin([PageLoad(1, ((7, b"a"), (8, b"b")), 0.02), PageLoad(2, ((9, b"c"),), 0.02)])
    pages = taken(loader, 3)
    assert [(page.load, page.place, page.is_asked) for page in pages] == [(1, None, False)] * 2 + [(2, None, False)]
    stuck.gate.set()
    time.sleep(0.1)
    assert not loader.take()
    loader.close()


def test_rests_grow_until_a_place_answers() -> None:
    health, now = PlaceHealth(), 100.0
    for _ in range(place_health.MOST_FAILURES - 1):
        health.fail(now)
        assert not health.rest(now)
    for seconds in (30, 60, 120, 240, 480, 600, 600):
        health.fail(now)
        assert health.rest(now) == seconds
        now += seconds
        assert not health.rest(now)
    health.succeed()
    health.hang(now)
    assert health.rest(now + 1000) == 30, "nobody asks a place while a thread waits for it"
    health.answer()
    assert not health.rest(now + 1000)


def test_a_place_that_fails_is_left_alone(place: Gated, tmp_path: Path) -> None:
    kind = KINDS["full"]
    asks = [Ask(prompt_of(seed, 70), greedy(4)) for seed in range(3)]
    expected = cold(kind, tmp_path, asks)
    with Rig(kind.model()) as rig:
        rig.run_one_by_one(asks)
        rig.engine.rest()
        place.fails, place.error = set(range(1, 99)), OSError("the network is down")
        assert_equal(answers_of(rig.run_one_by_one(asks)), expected)
        assert place.num_loads == place_health.MOST_FAILURES
        assert stats_of(rig).num_loads == 1


def test_a_place_that_is_slower_than_computing_is_not_waited_for(place: Gated, tmp_path: Path,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_choice, "LEAST_TOKENS", 64)
    monkeypatch.setattr(load_choice, "LEAST_PAGES", 4)
    monkeypatch.setattr(with_media, "LOAD_PATIENCE", 20.0)
    kind = KINDS["full"]
    (ask,) = asks_of(kind, (70,))
    expected = cold(kind, tmp_path, [ask])
    with kind.open(tmp_path) as rig:
        rig.run_one_by_one([Ask(prompt_of(seed, 70), greedy(2)) for seed in range(3)])
        rig.run([ask])
        place.pause = 0.09  # less than a hang, and more than any prompt takes
        for _ in range(3):
            rig.engine.rest()
            outputs = rig.run([ask])
            assert_equal(answers_of(outputs), expected)
        assert cached_of(outputs) == [0]
        assert stats_of(rig).num_loads == 1 and stats_of(rig).num_unloaded == {"slower than computing": 2}
        figures = [figure for figure in stats_of(rig).figures() if figure.name == "cache_unloaded"]
        assert [(figure.value, figure.label) for figure in figures] == [(2, 'reason="slower than computing"')]


def test_files_that_cannot_be_read_to_their_end(tmp_path: Path) -> None:
    """A read of a pipe hangs, as one of a lost network disk does."""
    kind = KINDS["mamba2"]
    (ask,) = asks_of(kind, (70,))
    expected = cold(kind, tmp_path, [ask])
    tier = {"disk_cache_dir": str(tmp_path / "cache")}
    with kind.open(tmp_path, **tier) as rig:
        rig.run([ask])
    files = object_files(tmp_path / "cache")
    for path in files:
        path.unlink()
        os.mkfifo(path)
    with kind.open(tmp_path, **tier) as rig:
        for _ in range(2):
            assert_equal(answers_of(rig.run([ask])), expected)
            rig.engine.rest()
        assert stats_of(rig).num_unloaded == {"too late": 1} and not stats_of(rig).num_loaded["disk"]
        released = [os.open(path, os.O_RDWR) for path in files]
        for path, file in zip(files, released, strict=True):
            path.unlink()
            os.write(file, b"late " * 1000)
            os.close(file)
        time.sleep(0.05)
        assert_equal(answers_of(rig.run([ask])), expected)
