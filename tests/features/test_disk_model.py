"""Random operations on the disk cache and on the host's, beside a dict that knows what every key should hold."""

from __future__ import annotations

import random
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.features.disk_cases import DOMAIN, bytes_in, get, key_of, object_files, opened, put

SIZE = 1 << 20
LARGEST = 52 << 10
numbers = st.integers(0, 60)
which = st.integers(0, 1)


def damage(path: Path, draw: random.Random) -> None:
    """Flip a bit, and perhaps cut the end off."""
    with suppress(FileNotFoundError):  # evicted meanwhile
        data = bytearray(path.read_bytes())
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data[:draw.randrange(len(data))] if draw.random() < 0.3 else data)


class DiskMachine(RuleBasedStateMachine):
    """Two stores on one folder. What was dropped and not stored again must be a miss, in every store that knows; what
    was never evicted must be found."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.contexts, self.stores = [], []

    @initialize()
    def start(self) -> None:
        self.there: set[int] = set()
        self.is_whole = True  # nothing was damaged or evicted yet
        self.start_again()

    def start_again(self) -> None:
        self.contexts = [opened(self.folder / "cache", SIZE) for _ in range(2)]
        self.stores = [context.__enter__() for context in self.contexts]

    @rule(store=which, number=numbers, boundary=st.booleans())
    def store(self, store: int, number: int, boundary: bool) -> None:
        assert put(self.stores[store], key_of(number), boundary=boundary)
        assert get(self.stores[store], key_of(number)) or not self.is_all_there()  # the other store may evict it now
        self.there.add(number)

    @rule(store=which, chosen=st.lists(numbers, max_size=3))
    def drop(self, store: int, chosen: list[int]) -> None:
        self.settle()
        self.stores[store].drop([key_of(number) for number in chosen])
        for number in chosen:
            assert not get(self.stores[store], key_of(number))
        self.there -= set(chosen)
        self.settle()  # else the other store takes what was dropped for stored

    @rule(store=which, number=numbers)
    def load(self, store: int, number: int) -> None:
        get(self.stores[store], key_of(number))

    @rule(store=which, number=numbers)
    def touch(self, store: int, number: int) -> None:
        self.stores[store].touch(key_of(number))

    @rule(store=which, number=numbers, until=st.sampled_from([0.0, 1e12]))
    def pin(self, store: int, number: int, until: float) -> None:
        self.stores[store].pin([key_of(number)], until)

    @rule()
    def settle(self) -> None:
        """Everything is written, and both know of it."""
        for store in (*self.stores, *self.stores):
            assert store.flush()
        self.is_all_there()
        for store in self.stores:
            for number in range(61):
                get(store, key_of(number))  # what is damaged is found, and removed
        for store in (*self.stores, *self.stores):
            assert store.flush()
        held = [{number for number in range(61) if store.contains(key_of(number))} for store in self.stores]
        assert held[0] == held[1] and held[0] <= self.there
        assert held[0] == self.there or not self.is_whole
        self.there = held[0]
        assert list(self.stores[0]._log.index.order.next_victims()) == list(
            self.stores[1]._log.index.order.next_victims()), "they agree on what is evicted"

    def is_all_there(self) -> bool:
        self.is_whole = self.is_whole and not any(store.stats().evicted for store in self.stores)
        return self.is_whole

    @rule(store=which)
    def restart(self, store: int) -> None:
        self.is_whole = self.is_whole and not self.stores[store].stats().evicted
        self.contexts[store].__exit__(None, None, None)
        self.is_whole = self.is_whole and not self.stores[store].stats().evicted
        self.contexts[store] = opened(self.folder / "cache", SIZE)
        self.stores[store] = self.contexts[store].__enter__()

    @rule(seed=st.integers(0, 1000))
    def damage_object(self, seed: int) -> None:
        self.is_whole = False
        draw = random.Random(seed)
        for path in object_files(self.folder / "cache")[:1]:
            damage(path, draw)

    @rule(seed=st.integers(0, 1000))
    def restart_both_with_a_damaged_log(self, seed: int) -> None:
        self.is_whole = False
        for context in self.contexts:
            context.__exit__(None, None, None)
        damage(self.folder / "cache" / "index.log", random.Random(seed))
        self.start_again()

    @invariant()
    def is_bounded(self) -> None:
        if self.stores:
            assert bytes_in(self.folder) <= SIZE + 2 * LARGEST
            assert DOMAIN.hex() in [path.name for path in (self.folder / "cache").iterdir()]

    def teardown(self) -> None:
        for context in self.contexts:
            context.__exit__(None, None, None)
        shutil.rmtree(self.folder)


TestDiskMachine = DiskMachine.TestCase
TestDiskMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
