"""The host's store: what comes back, what is evicted, and that its arena is never overfull."""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections.abc import Callable

import pytest

from outrider.cache.eviction import EvictionOrder
from outrider.features.tiers import host_store
from outrider.features.tiers.host_store import HostStore
from outrider.features.tiers.medium import Lease, PageMedium

CELL = 1000


def key_of(number: int) -> bytes:
    return hashlib.sha256(b"host %d" % number).digest()


def payload_of(number: int, length: int) -> bytes:
    return hashlib.shake_128(key_of(number)).digest(length)


def put(store: PageMedium, number: int, length: int = CELL, *, boundary: bool = False) -> bool:
    return store.store(key_of(number), memoryview(payload_of(number, length)), boundary=boundary)


def get(store: PageMedium, number: int, length: int = CELL) -> bool:
    into = bytearray(length)
    found = store.load(key_of(number), memoryview(into))
    assert not found or into == payload_of(number, length)
    return found


def held(store: PageMedium, count: int) -> list[int]:
    return [number for number in range(count) if store.contains(key_of(number))]


def test_objects_of_any_length_come_back() -> None:
    store = HostStore(20 * CELL, cell_bytes=CELL)
    for number, length in enumerate((0, 1, 999, 1000, 1001, 5000)):
        assert put(store, number, length) and get(store, number, length)
    assert not get(store, 3, 999) and not get(store, 77)
    assert store.stats().missed == {"length": 1, "absent": 1} and store.stats().num_bytes == 8001


def test_interior_objects_go_first_and_a_hit_promotes() -> None:
    store = HostStore(10 * CELL, cell_bytes=CELL)
    for number in range(10):
        put(store, number, boundary=number < 3)
    store.touch(key_of(3))
    for number in range(10, 18):
        put(store, number)
    assert held(store, 18) == [0, 1, 2, 3, *range(12, 18)]
    for number in range(18, 30):
        put(store, number, boundary=True)
    assert held(store, 30) == list(range(20, 30))
    assert store.stats().evicted == 20


def test_pins_and_drops() -> None:
    store = HostStore(4 * CELL, cell_bytes=CELL)
    for number in range(4):
        put(store, number, boundary=True)
    store.pin([key_of(0)], time.time() + 1000)
    store.pin([key_of(1)], time.time() - 1)
    store.drop([key_of(3), key_of(99)])
    assert held(store, 4) == [0, 1, 2]
    for number in range(10, 20):
        put(store, number, boundary=True)
    assert held(store, 20) == [0, 17, 18, 19]


def test_an_object_larger_than_the_arena_is_declined() -> None:
    store = HostStore(4 * CELL, cell_bytes=CELL)
    put(store, 0)
    assert not put(store, 1, 4 * CELL + 1) and store.contains(key_of(0))
    assert put(store, 1, 4 * CELL) and not store.contains(key_of(0))
    assert store.stats().declined == {"too large": 1}


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot hold one page of 1000"):
        HostStore(999, cell_bytes=CELL)
    with pytest.raises(ValueError, match="the memory has 3000 bytes"):
        HostStore(4 * CELL, cell_bytes=CELL, memory=memoryview(bytearray(3000)))


def test_the_given_memory_is_the_arena() -> None:
    memory = bytearray(4 * CELL)
    store = HostStore(4 * CELL, cell_bytes=CELL, memory=memoryview(memory))
    put(store, 0)
    assert payload_of(0, CELL) in memory


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.001)


def test_an_arena_that_is_allocated_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_store, "PART_BYTES", 3 * CELL)
    turn, sizes = threading.Semaphore(0), []

    def make_memory(num_bytes: int) -> memoryview:
        assert turn.acquire(timeout=20)
        sizes.append(num_bytes)
        return memoryview(bytearray(num_bytes))

    store = HostStore(7 * CELL + 5, cell_bytes=CELL, make_memory=make_memory)
    assert not put(store, 0) and store.stats().declined == {"no room": 1}
    for capacity in (3, 6, 7):
        turn.release()
        wait_until(lambda: store.stats().capacity == capacity * CELL)  # noqa: B023
        for number in range(10 * capacity, 10 * capacity + 10):
            assert put(store, number) and get(store, number)
        assert held(store, 99) == list(range(10 * capacity + 10 - capacity, 10 * capacity + 10))
        assert all(get(store, number) for number in held(store, 99))
    assert sizes == [3 * CELL, 3 * CELL, CELL]


def test_memory_that_cannot_be_had_costs_room_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_store, "PART_BYTES", 2 * CELL)
    parts = iter([memoryview(bytearray(2 * CELL))])

    def make_memory(num_bytes: int) -> memoryview:
        try:
            return next(parts)
        except StopIteration:
            raise RuntimeError("CUDA error: out of memory") from None

    store = HostStore(8 * CELL, cell_bytes=CELL, make_memory=make_memory)
    wait_until(lambda: store.stats().capacity == 2 * CELL)
    for number in range(5):
        assert put(store, number)
    assert held(store, 5) == [3, 4]


def test_memory_is_left_for_others(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(host_store, "available_bytes", lambda: host_store.LEAST_FREE)
    store = HostStore(8 * CELL, cell_bytes=CELL, make_memory=lambda size: memoryview(bytearray(size)))
    wait_until(lambda: "too little free memory" in caplog.text)
    assert not put(store, 1) and not store.stats().capacity


def test_lent_bytes_do_not_change() -> None:
    store = HostStore(3 * CELL, cell_bytes=CELL)
    for number in range(3):
        put(store, number)
    leases = [store.lend(key_of(number), CELL) for number in (0, 0, 1)]
    assert store.lend(key_of(2), CELL - 1) is None and store.lend(key_of(9), CELL) is None
    store.drop([key_of(1)])
    for number in range(10, 20):
        put(store, number)
        put(store, 1)  # the key of a lent object is stored anew, elsewhere
    assert len(held(store, 20)) == 1
    for lease, number in zip(leases, (0, 0, 1), strict=True):
        assert lease is not None and bytes(lease.data) == payload_of(number, CELL)
        lease.end()
    for number in range(30, 33):
        assert put(store, number)
    assert held(store, 40) == [30, 31, 32]


def test_random_operations_agree_with_a_dict() -> None:
    draw = random.Random(1)
    store = HostStore(50 * CELL, cell_bytes=CELL)
    lengths: dict[int, int] = {}
    leases: list[tuple[Lease, int]] = []
    for _ in range(5000):
        number = draw.randrange(100)
        match draw.randrange(4):
            case 0:
                lengths[number] = lengths.get(number) or draw.choice([CELL, draw.randrange(1, 5000)])
                assert put(store, number, lengths[number], boundary=draw.random() < 0.3)
            case 1:
                store.touch(key_of(number))
            case 2 if draw.random() < 0.1:
                store.drop([key_of(number)])
            case 2 if draw.random() < 0.1:
                lease = store.lend(key_of(number), CELL)
                if lease is not None:
                    leases.append((lease, number))
            case 2 if leases:
                lease, lent = leases.pop(draw.randrange(len(leases)))
                assert bytes(lease.data) == payload_of(lent, CELL), "the bytes of a lent object have changed"
                lease.end()
            case _:
                assert get(store, number, lengths.get(number, 1)) == store.contains(key_of(number))
        cells = [cell for placement in store._placed.values() for cell in placement.cells]
        assert sorted([*cells, *store._free, *store._orphans]) == list(range(50)), "a cell has one object, or is free"
        assert len(store._order) == len(store._placed)
    assert store.stats().evicted > 100


def test_threads_never_read_bytes_of_another_object() -> None:
    store = HostStore(8 * CELL, cell_bytes=CELL)
    failures = []

    def use(seed: int) -> None:
        draw = random.Random(seed)
        try:
            for _ in range(1500):
                number = draw.randrange(20)
                if draw.random() < 0.5:
                    put(store, number, 1500)
                else:
                    get(store, number, 1500)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and store.stats().loaded > 100


def test_a_later_pin_outlives_an_earlier_one_of_the_same_object() -> None:
    order: EvictionOrder[str] = EvictionOrder()
    for name in ("pinned twice", "never pinned"):
        order.add(name, is_kept=True)
    order.pin("pinned twice", 10.0)
    order.pin("pinned twice", 20.0)
    order.end_pins(15.0)
    assert [*order.pinned] == ["pinned twice"] and [*order.next_victims()] == ["never pinned", "pinned twice"]
    order.end_pins(20.0)
    assert not order.pinned and [*order.kept] == ["never pinned", "pinned twice"]
