"""Places that fail, and engines that change while pages are on their way: a request has its own text, or fewer hits."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import feature_list
from outrider.cache.events import CacheEvents
from outrider.cache.observed_pool import Arrival
from outrider.core.outputs import RequestOutput
from outrider.engine.kv_event_wire import EventWriter
from outrider.engine.maintenance import Maintenance
from outrider.feature_list import FeatureEntry, register_feature
from outrider.features.tiers import mover
from outrider.features.tiers.copies import HostCopies, Store, buffer_of
from outrider.features.tiers.loader import StagedPage
from outrider.features.tiers.tiers_in_engine import TiersInEngine
from outrider.features.tiers.tiers_on_device import TiersOnDevice
from outrider.mixers.pool import DevicePool
from outrider.runner.commands import NamedArray, UpdateWeights
from tests.engine.harness import CONFIGS, Ask, Rig, greedy, prompt_of, random_model, tiny_model
from tests.tiers.rigs import KINDS, Kind, answers_of, asks_of, assert_equal, cache_of, cached_of, stats_of

FAMILIES = ("full", "full and sliding", "mamba2, mtp", "gated delta")


@dataclass
class Gated:
    """A place whose loads wait for the test, and whose bytes it may spoil."""

    name: str = "gated"
    pages: dict[bytes, bytes] = field(default_factory=dict)
    gate: threading.Event = field(default_factory=threading.Event)
    fails: set[int] = field(default_factory=set)  # loads, by number
    error: Exception | None = None
    pause: float = 0.0  # seconds of each load
    is_wrong: bool = False  # loads bring other bytes
    declines: bool = False  # all stores
    num_loads: int = 0
    flags: dict[bytes, bool] = field(default_factory=dict)

    def contains(self, key: bytes) -> bool:
        return key in self.pages

    def keys(self) -> list[bytes]:
        return list(self.pages)

    def store(self, key: bytes, payload: memoryview, *, boundary: bool = False) -> bool:
        if self.declines:
            return False
        assert self.pages.get(key, bytes(payload)) == bytes(payload), "two pages have one key"
        self.pages[key], self.flags[key] = bytes(payload), boundary
        return True

    def load(self, key: bytes, into: memoryview) -> bool:
        assert self.gate.wait(20)
        time.sleep(self.pause)
        self.num_loads += 1
        if self.num_loads in self.fails:
            into[:] = b"\xff" * len(into)
            if self.error is not None:
                raise self.error
            return False
        into[:] = b"\xff" * len(into) if self.is_wrong else self.pages[key]
        return True

    def touch(self, key: bytes) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def place() -> Iterator[Gated]:
    place = Gated()
    place.gate.set()
    register_feature(FeatureEntry(
        "gated", worker=lambda config: TiersOnDevice(config, lambda domain, page_bytes: [place]),
        engine=partial(TiersInEngine, names=[place.name])))
    yield place
    place.gate.set()
    feature_list._registered.pop("gated")


def cold(kind: Kind, path: Path, asks: list[Ask]) -> Any:
    with kind.open(path, enable_prefix_caching=False) as rig:
        return answers_of(rig.run_one_by_one(asks))


def begin(rig: Rig, ask: Ask, name: str = "waiting") -> None:
    """Add a request, and step until its pages are on their way."""
    rig.outputs.add(name, ask.prompt, ask.params)
    for _ in range(20):
        rig.outputs.step()
        if cache_of(rig)._pending.loads:
            return
    raise AssertionError("nothing is loaded")


def finish(rig: Rig) -> Any:
    outputs: dict[str, RequestOutput] = {}
    while rig.engine.has_work:
        outputs |= {output.request_id: output for output in rig.outputs.step() if output.finished}
    rig.assert_clean()
    return outputs


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("fails", [{1}, {2, 3}, set(range(1, 99))])
def test_a_failed_load_is_a_miss(name: str, fails: set[int], place: Gated, tmp_path: Path) -> None:
    kind = KINDS[name]
    asks = asks_of(kind, (70, 49))
    expected = cold(kind, tmp_path, asks)
    place.fails, place.error = fails, OSError("the disk is gone") if fails == {2, 3} else None
    with kind.open(tmp_path) as rig:
        rig.run_one_by_one(asks)
        rig.engine.rest()
        outputs = rig.run_one_by_one(asks)
        assert_equal(answers_of(outputs), expected)
        assert stats_of(rig).num_failed == min(len(fails), place.num_loads)
        rig.engine.rest()
        assert_equal(answers_of(rig.run(asks)), expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_others_run_while_pages_come(name: str, place: Gated, tmp_path: Path) -> None:
    kind = KINDS[name]
    slow, other = asks_of(kind, (70, 49))
    expected = cold(kind, tmp_path, [slow, other])
    with kind.open(tmp_path) as rig:
        rig.run([slow])
        rig.engine.rest()
        place.gate.clear()
        begin(rig, slow)
        rig.outputs.add("other", other.prompt, other.params)
        outputs: dict[str, RequestOutput] = {}
        while "other" not in outputs:
            outputs |= {output.request_id: output for output in rig.outputs.step() if output.finished}
            rig.scheduler.check_integrity()
        assert "waiting" not in outputs
        place.gate.set()
        outputs |= finish(rig)
        assert_equal(answers_of([outputs["waiting"], outputs["other"]]), expected)
        assert cached_of([outputs["waiting"]])[0] >= 32


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("change", ["abort", "sleep", "reset", "preempt", "failed step"])
def test_changes_while_pages_come(name: str, change: str, place: Gated, tmp_path: Path) -> None:
    kind = KINDS[name]
    (ask,) = asks_of(kind, (70,))
    expected = cold(kind, tmp_path, [ask])
    with kind.open(tmp_path) as rig:
        rig.run([ask])
        rig.engine.rest()
        place.gate.clear()
        begin(rig, ask)
        match change:
            case "abort":
                rig.engine.abort("waiting")
            case "sleep":
                maintenance = Maintenance(rig.engine)
                maintenance.sleep()
                maintenance.wake_up()
            case "reset":
                rig.engine.forget_cached()
            case "preempt":
                rig.scheduler.preempt_all()
            case "failed step":
                rig.step.run = failing_once(rig)  # type: ignore[method-assign]
                rig.outputs.step()
                rig.outputs.step()
        rig.scheduler.check_integrity()
        place.gate.set()
        outputs = finish(rig)
        if change != "abort":
            assert_equal(answers_of([outputs["waiting"]]), expected)
        outputs = rig.run([ask])
        assert_equal(answers_of(outputs), expected)
        assert cached_of(outputs)[0] >= 32


@pytest.mark.parametrize("change", ["abort and reset", "failed step"])
def test_a_load_that_was_cancelled_writes_to_no_page_of_others(change: str, place: Gated, tmp_path: Path) -> None:
    """Its pages are read while the next request, which needs all pages there are, already has them."""
    kind = KINDS["full"]
    first, second = asks_of(kind, (70, 71))
    second = Ask(second.prompt, greedy(36, logprobs=2))
    expected = cold(kind, tmp_path, [second])
    with kind.open(tmp_path, num_pages=8) as rig:
        rig.run([first])
        rig.engine.rest()
        place.gate.clear()
        begin(rig, first)
        if change == "failed step":
            rig.step.run = failing_once(rig)  # type: ignore[method-assign]
            rig.outputs.step()
            rig.outputs.step()
        rig.engine.abort("waiting")
        rig.engine.forget_cached()
        rig.outputs.add("second", second.prompt, second.params)
        while not cache_of(rig).pool.num_free == 1:
            rig.outputs.step()
        place.gate.set()
        for _ in range(200):
            if place.num_loads:
                break
            time.sleep(0.01)
        time.sleep(0.05)  # what is read now is there before the next step begins
        assert_equal(answers_of([finish(rig)["second"]]), expected)


def test_a_load_evicts_no_page_of_the_prefix_that_it_completes(place: Gated, tmp_path: Path) -> None:
    """The prefix begins with the pages that were used least recently."""
    kind = KINDS["full"]
    first, second = asks_of(kind, (70, 71))
    expected = cold(kind, tmp_path, [first])
    with kind.open(tmp_path, num_pages=8) as rig:
        rig.run_one_by_one([first, second])
        outputs = rig.run([first])
        assert_equal(answers_of(outputs), expected)
        assert (cached_of(outputs), stats_of(rig).num_loads, place.num_loads) == ([64], 1, 2)


def test_a_page_is_stored_before_a_load_takes_its_place(place: Gated, tmp_path: Path) -> None:
    """Pages that no place took are stored when they are evicted, here by the load that is read at once."""
    kind = KINDS["full"]
    first, second = asks_of(kind, (70, 71))
    with kind.open(tmp_path) as rig:
        rig.run([second])
        rig.engine.rest()
        right, place.pages = place.pages, {}
    with kind.open(tmp_path, num_pages=8) as rig:
        rig.run([first])
        rig.engine.rest()
        own = set(place.pages)
        place.declines = True
        rig.run([second])
        place.declines = False
        rig.run([first])
        rig.engine.rest()
    evicted = {key: data for key, data in place.pages.items() if key not in own}
    assert evicted and evicted.items() <= right.items()


def test_requests_with_one_prefix_wait_for_one_load(place: Gated, tmp_path: Path) -> None:
    kind = KINDS["full"]
    (ask,) = asks_of(kind, (70,))
    expected = cold(kind, tmp_path, [ask])
    with kind.open(tmp_path) as rig:
        rig.run([ask])
        rig.engine.rest()
        outputs = rig.run([ask, ask, ask])
        assert_equal(answers_of(outputs), expected * 3)
        assert stats_of(rig).num_loads == 1 and stats_of(rig).num_waits == 2 and place.num_loads == 4


def test_a_hit_has_pages_of_the_device_and_of_a_place(place: Gated, tmp_path: Path) -> None:
    kind = KINDS["full and sliding"]
    long, other = asks_of(kind, (70, 90))
    long_cold, other_cold = cold(kind, tmp_path, [long, other])
    mixed = 0
    for num_pages in (11, 12, 13, 14):
        with kind.open(tmp_path, num_pages=num_pages) as rig:
            cache = cache_of(rig)

            def count_mixed(request_id: int, arrival: Arrival, patience: float, load: Any = cache._load) -> None:
                nonlocal mixed
                mixed += bool(arrival.present)
                load(request_id, arrival, patience)

            cache._load = count_mixed  # type: ignore[method-assign]
            outputs = rig.run_one_by_one([long, other, long, other])
            assert_equal(answers_of(outputs), 2 * [long_cold, other_cold])
            assert not stats_of(rig).num_failed
    assert mixed and place.num_loads


def test_a_place_without_room_costs_nothing_but_hits(tmp_path: Path) -> None:
    kind = KINDS["mamba2, mtp"]
    asks = asks_of(kind, (70, 49))
    expected = cold(kind, tmp_path, asks)
    with kind.open(tmp_path, host_cache_memory=1) as rig:
        for _ in range(2):
            assert_equal(answers_of(rig.run(asks)), expected)
            rig.engine.rest()
        assert not stats_of(rig).num_loads
    with kind.open(tmp_path, host_cache_memory=0) as rig:
        assert_equal(answers_of(rig.run(asks)), expected)
        assert type(rig.scheduler.cache).__name__ == "CacheManager"


def test_a_place_that_cannot_be_used_leaves_the_others(tmp_path: Path) -> None:
    kind = KINDS["full"]
    asks = asks_of(kind, (70, 49))
    expected = cold(kind, tmp_path, asks)
    (tmp_path / "file").touch()
    for host, folder, used in ((1, "cache", "disk"), (1 << 20, "file", "host")):
        with kind.open(tmp_path, host_cache_memory=host, disk_cache_dir=str(tmp_path / folder)) as rig:
            for _ in range(2):
                assert_equal(answers_of(rig.run_one_by_one(asks)), expected)
                rig.engine.rest()
            assert set(stats_of(rig).num_loaded) == {used} and not stats_of(rig).num_failed
            assert stats_of(rig).num_stored[used] == stats_of(rig).num_held[used], "pages are stored again"


def test_what_the_disk_evicts_is_known(tmp_path: Path) -> None:
    kind = KINDS["full"]
    asks = [Ask(prompt_of(seed, 80), greedy(1)) for seed in range(40)]
    with kind.open(tmp_path, disk_cache_dir=str(tmp_path / "cache"), disk_cache_size=1 << 20) as rig:
        cache = cache_of(rig)
        record = cache.pool.events = CacheEvents(cache.layout)
        rig.run_one_by_one(asks)
        assert stats_of(rig).num_stored["disk"] == 200
        for _ in range(200):  # the disk is written by a thread
            if stats_of(rig).num_held["disk"] < 120:
                break
            time.sleep(0.05)
            rig.run(asks[-1:])
        assert stats_of(rig).num_held["disk"] < 120, "the account keeps what was evicted"
        removed = [event for event in EventWriter(cache.layout).write(record.take()) if event["type"] == "BlockRemoved"]
        assert {event["medium"] for event in removed} == {"GPU", "STORAGE"}


def test_damaged_files_are_misses(tmp_path: Path) -> None:
    kind = KINDS["gated delta"]
    asks = asks_of(kind, (70, 49))
    expected = cold(kind, tmp_path, asks)
    tiers = {"disk_cache_dir": str(tmp_path / "cache")}
    with kind.open(tmp_path, **tiers) as rig:
        rig.run(asks)
    sizes = [path.stat().st_size for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    for path in (tmp_path / "cache").rglob("*"):
        if path.is_file() and path.stat().st_size == max(sizes):
            data = bytearray(path.read_bytes())
            data[-5] ^= 4
            path.write_bytes(data)
    with kind.open(tmp_path, **tiers) as rig:
        assert_equal(answers_of(rig.run(asks)), expected)
        assert stats_of(rig).num_failed and not stats_of(rig).num_loaded["disk"]
        assert_equal(answers_of(rig.run(asks)), expected)


def updated(seed: int) -> UpdateWeights:
    source = tiny_model("llama")
    arrays = []
    for name, slot in source.weights().items():
        tensor = slot.target.reshape(slot.shape)
        arrays.append(NamedArray(name, "float64", tuple(slot.shape),
                                 (tensor * (1 + seed / 10)).contiguous().reshape(-1).numpy().view("uint8")))
    return UpdateWeights(arrays=tuple(arrays))


def test_engines_with_other_weights_share_no_pages(place: Gated, tmp_path: Path) -> None:
    """Both engines have updated their weights once, to other weights."""
    ask = Ask(prompt_of(70, 70), greedy(5, logprobs=2))
    answers = []
    for seed in (1, 2, 1):
        model = random_model(CONFIGS["llama"], torch.float64, 5)
        with Rig(model) as rig:
            rig.run([ask])
            Maintenance(rig.engine).update_weights(updated(seed))
            before = place.num_loads
            answers += answers_of(rig.run([ask]))
            assert place.num_loads == before, "a page of other weights is loaded"
            rig.engine.rest()
            assert_equal(answers_of(rig.run([ask])), answers[-1:])
            assert place.num_loads > before, "pages of these weights are not found"
    assert answers[0] == answers[2] != answers[1]


def test_states_inside_a_prompt_are_marked(place: Gated, tmp_path: Path) -> None:
    kind = KINDS["mamba2"]
    (ask,) = asks_of(kind, (90,), max_tokens=2)
    with kind.open(tmp_path, checkpoint_interval=32, max_num_batched_tokens=16) as rig:
        rig.run([ask])
        num_pages = cache_of(rig).checkpoints.capacity.checkpoint_pages
    marked = list(place.flags.values()).count(False)
    assert marked == 2 * num_pages, "those after 32 and 64 tokens, and not that after 80"


def test_events_tell_where_pages_lie(tmp_path: Path) -> None:
    kind = KINDS["full"]
    asks = asks_of(kind, (70, 60, 50, 80))
    with kind.open(tmp_path) as rig:
        page = rig.step.pool.layout.page_bytes
    with kind.open(tmp_path, host_cache_memory=6 * page, disk_cache_dir=str(tmp_path / "cache")) as rig:
        cache = cache_of(rig)
        record = cache.pool.events = CacheEvents(cache.layout)
        rig.run_one_by_one(asks)
        events = EventWriter(cache.layout).write(record.take())
        places: dict[str, set[int]] = {"GPU": set(), "CPU": set(), "STORAGE": set()}
        for event in events:
            hashes = set(event["block_hashes"])
            if event["type"] == "BlockStored":
                places[event["medium"]] |= hashes
            else:
                assert event["type"] == "BlockRemoved" and hashes <= places[event["medium"]]
                places[event["medium"]] -= hashes
        assert places["GPU"] == places["STORAGE"] and len(places["CPU"]) == 6 < len(places["GPU"])


def test_host_memory_that_is_too_small_evicts(tmp_path: Path) -> None:
    kind = KINDS["full"]
    asks = asks_of(kind, (70, 60, 50, 80, 75, 65))
    expected = cold(kind, tmp_path, asks)
    with kind.open(tmp_path) as rig:
        page = rig.step.pool.layout.page_bytes
    with kind.open(tmp_path, host_cache_memory=8 * page, num_pages=9) as rig:
        for _ in range(3):
            assert_equal(answers_of(rig.run_one_by_one(asks)), expected)
        assert 0 < stats_of(rig).num_held["host"] <= 8, "the account keeps what was evicted"
        figures = {figure.name: figure.value for figure in cache_of(rig).stats.figures()}
        assert figures["cache_host_bytes_stored"] == stats_of(rig).num_stored["host"] * page > 0


class LateCopies(HostCopies):
    """Copies whose bytes come when later steps settle them, as those of a GPU do, in buffers of their own."""

    keeps_buffers = True

    def __init__(self, pool: DevicePool) -> None:
        super().__init__(pool)
        self._late: list[tuple[int, Store, bytes]] = []

    def store(self, pages: Sequence[tuple[int, Store]]) -> None:
        self._late += [(3, store, bytes(buffer_of(self._pool.data[page]))) for page, store in pages]

    def settle(self, *, waits: bool = False) -> list[StagedPage]:
        self._late = [(steps - 1, store, data) for steps, store, data in self._late]
        for _, store, data in self._late:
            if self._late[0][0] <= 0:
                store(memoryview(data))
        self._late = [] if self._late and self._late[0][0] <= 0 else self._late
        return super().settle(waits=waits)


@pytest.mark.parametrize("change", ["none", "reset", "failed step"])
def test_stores_that_take_several_steps(change: str, place: Gated, tmp_path: Path,
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mover, "HostCopies", LateCopies)
    kind = KINDS["full"]
    (ask,) = asks_of(kind, (70,), max_tokens=1)
    expected = cold(kind, tmp_path, [ask])
    with kind.open(tmp_path) as rig:
        rig.outputs.add("first", ask.prompt, ask.params)
        while not cache_of(rig)._pending.num_stores:
            rig.outputs.step()
        if change == "reset":
            while rig.scheduler.num_running:
                rig.outputs.step()
            rig.engine.forget_cached()
        elif change == "failed step":
            monkeypatch.setattr(rig.step, "run", failing_once(rig))
        for _ in range(100):
            if not rig.engine.has_work:
                break
            rig.outputs.step()
        assert not rig.engine.has_work, "the engine asks for stores that were reported"
        rig.engine.rest()
        outputs = rig.run([ask])
        assert_equal(answers_of(outputs), expected)
        if change != "failed step":  # after which reports may be missing
            assert bool(place.num_loads) is (change != "reset"), "what was forgotten is found"


def failing_once(rig: Rig) -> Any:
    run = rig.step.run

    def fail_once(*args: Any) -> Any:
        rig.step.run = run  # type: ignore[method-assign]
        raise RuntimeError("a step fails")

    return fail_once
