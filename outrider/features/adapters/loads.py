"""AdapterRegistry: the engine's list of adapters by name, and the loads of each one. No torch.

Every load has a fresh number, which requests carry. The digest of an adapter's files is part of the keys of its pages,
so an adapter whose files have changed shares no pages with the earlier load. The earlier load is served until the new
one has been read, and stays if the new one cannot be read. All methods are called in the thread that calls
`Engine.step`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple
from weakref import WeakSet

from outrider.core.checked_request import CheckedRequest
from outrider.engine.engine_feature import Order
from outrider.features.adapters.commands import AdapterRead, BeginAdapter, DropAdapter, PollAdapter
from outrider.features.adapters.slots import AdapterSlots
from outrider.lora_request import (
    AdapterHold,
    AdapterLoads,
    AdaptersInUse,
    LoadedAdapter,
    LoRARequest,
    UnknownAdapter,
    UnreadableAdapter,
)

MAX_DROPPED = 1024  # dropped loads that are remembered, for requests that were checked before


@dataclass
class AdapterLoad:
    """One load of an adapter: a single reading of its folder, with a number of its own."""

    number: int
    name: str
    path: str
    num_requests: int = 0  # that were added and have not ended
    holds: WeakSet[AdapterHold] = field(default_factory=WeakSet)  # those of fronts, which keep them alive
    is_replaced: bool = False  # dropped as soon as its last request ends
    is_removed: bool = False  # nor is its folder to be read again for requests that were checked before
    answer: Future[AdapterRead | None] | None = None  # the worker's, whether it has been read
    digest: str = ""  # of its files, once they have been read

    @property
    def part(self) -> LoadedAdapter:
        return LoadedAdapter(self.number, self.digest)

    @property
    def is_idle(self) -> bool:
        return not self.num_requests and not self.holds


class DroppedLoad(NamedTuple):
    """The name and path of a load that was dropped."""

    name: str
    path: str | None  # None: the adapter was removed


class AdapterRegistry(AdapterLoads):
    def __init__(self, max_loaded: int, max_slots: int, order: Order, slots: Callable[[], AdapterSlots],
                 sizes: dict[int, int], labels: dict[str, str]) -> None:
        """max_loaded: the most adapters in the host's memory. slots: the scheduler's adapter slots. sizes: the size in
        memory of each load, by load number; the slots read it. labels: the name of each load, by the cache key that its
        requests have."""
        self.max_slots, self.sizes, self._labels = max_slots, sizes, labels
        self._max_loaded, self._order, self._slots = max_loaded, order, slots
        self._numbers = count(1)
        self._loads: OrderedDict[int, AdapterLoad] = OrderedDict()  # least recently used first
        self._current: dict[str, int] = {}  # number of the newest load by name, among those that have been read
        self._paths: dict[str, str] = {}  # of names that were given to keep, loaded or not
        self._dropped: OrderedDict[int, DroppedLoad] = OrderedDict()  # by number, the last ones

    # Names

    @property
    def names(self) -> Mapping[str, str]:
        return self._paths

    def names_in_use(self) -> tuple[list[str], list[str]]:
        numbers = set(self._slots().running)
        used = [load for load in list(self._loads.values()) if load.num_requests]
        return (sorted({load.name for load in used if load.number in numbers}),
                sorted({load.name for load in used if load.number not in numbers}))

    def find(self, name: str) -> LoRARequest:
        """The adapter that `keep` has stored under a name."""
        if name not in self._paths:
            raise UnknownAdapter(f"no adapter {name!r} is loaded: load it first")
        return LoRARequest(name, 1, self._paths[name])

    def keep(self, name: str, path: str) -> None:
        """Store a name with its folder, so that requests may ask for the adapter by the name alone."""
        self._paths[name] = path

    def remove(self, name: str) -> None:
        for number, dropped in self._dropped.items():
            if dropped.name == name:
                self._dropped[number] = DroppedLoad(name, None)
        loads = [load for load in self._loads.values() if load.name == name and not load.is_replaced]
        if self._paths.pop(name, None) is None and not loads:
            raise UnknownAdapter(f"no adapter {name!r} is loaded, so there is none to remove")
        self._current.pop(name, None)
        for load in loads:
            load.is_removed = True
            self._replace(load)

    # Loads

    def begin(self, asked: LoRARequest) -> AdapterHold:
        number = None if asked.load_inplace else self._find(asked)
        if number is None:
            self._make_room(asked.lora_name)
            number = next(self._numbers)
            # The order comes last: a load that an interrupt leaves behind is known here, and `drop_unused` drops it.
            self._loads[number] = AdapterLoad(number, asked.lora_name, asked.lora_path)
            self._order(BeginAdapter(number, asked.lora_name, asked.lora_path))
        self._loads.move_to_end(number)
        return self._hold(number)

    def hold(self, number: int) -> AdapterHold:
        again = self._dropped.get(number)
        if again is not None and again.name not in self._current:
            paths = {each: own.path for each, own in self._dropped.items() if own.name == again.name}
            if (path := paths[max(paths)]) is not None:
                return self.begin(LoRARequest(again.name, 1, path))
        return self._hold(self.newest(number))

    def is_loaded(self, number: int) -> bool:
        return number in self.sizes

    def is_ready(self, number: int) -> bool:
        if number in self.sizes:
            return True
        load = self._loads.get(number)
        if load is None:
            raise UnknownAdapter("the adapter could not be loaded, or was removed while the request waited: load it "
                                 "again")
        if load.answer is None:
            load.answer = self._order(PollAdapter(number))
        if not load.answer.done():
            return False
        answer, load.answer = load.answer, None
        read = answer.result()
        if read is None:
            return False
        if read.error is not None:
            self._drop(load)
            raise UnreadableAdapter(read.error, load.path)
        self.sizes[number], load.digest = read.size, read.digest
        self._labels[load.part.cache_key] = load.name
        self._serve(load)
        return True

    def identity(self, number: int) -> tuple[str, str]:
        load = self._loads[number]
        return load.name, load.digest

    def release(self, hold: AdapterHold) -> None:
        load = self._loads.get(hold.number)
        if load is not None and hold in load.holds:
            load.holds.remove(hold)
            if load.is_idle and load.number not in self.sizes and load.name in self._current:
                load.is_replaced = True  # no front waits for this reload any more: the load before stays
            self._drop_replaced(load)

    # Requests

    def newest(self, number: int) -> int:
        """The load that a request uses when the engine adds it: the load found when the request was checked, or a newer
        load of the same adapter. Raises UnknownAdapter if the adapter is not loaded any more."""
        if number in self.sizes:
            return number
        dropped = self._dropped.get(number)
        newer = None if dropped is None else self._current.get(dropped.name)
        if newer is None:
            raise UnknownAdapter("the request's adapter has been removed: load the adapter again, and send the request "
                                 "again")
        return newer

    def renew(self, asked: CheckedRequest) -> CheckedRequest:
        part = asked.part(LoadedAdapter)
        return asked if part is None else asked.with_part(self._loads[self.newest(part.number)].part)

    def enter(self, requests: Sequence[CheckedRequest]) -> None:
        """Count the requests as users of their loads. If the load of one request is missing, UnknownAdapter is raised
        and nothing is counted."""
        entering = [part.number for asked in requests if (part := asked.part(LoadedAdapter)) is not None]
        if not self.sizes.keys() >= set(entering):
            raise UnknownAdapter("the request's adapter is not loaded any more: load the adapter again, and send the "
                                 "request again")
        for number in entering:
            self._loads[number].num_requests += 1
            self._loads.move_to_end(number)

    def leave(self, asked: CheckedRequest) -> None:
        part = asked.part(LoadedAdapter)
        load = None if part is None else self._loads.get(part.number)
        if load is not None and load.num_requests:
            load.num_requests -= 1
            self._drop_replaced(load)

    def forget_requests(self) -> None:
        """Set the number of requests that use each load to 0. The loads stay, because the requests enter again."""
        for load in self._loads.values():
            load.num_requests = 0

    def drop_unused(self) -> None:
        """Serve the loads that have been read. Drop loads that were replaced, and loads still being read that no front
        waits for."""
        for load in list(self._loads.values()):
            if load.number not in self.sizes and load.is_idle:
                self._drop(load)
            elif load.number in self.sizes and not load.is_replaced and self._current.get(load.name) != load.number:
                self._serve(load)
            else:
                self._drop_replaced(load)

    # Inside

    def _hold(self, number: int) -> AdapterHold:
        hold = AdapterHold(number)
        self._loads[number].holds.add(hold)
        return hold

    def _find(self, asked: LoRARequest) -> int | None:
        """The load of an adapter: the load that is served under its name, or else a load that is still being read."""
        current = self._current.get(asked.lora_name)
        reading = (number for number in reversed(self._loads) if number not in self.sizes)
        for number in reading if current is None else (current, *reading):
            load = self._loads[number]
            if (load.name, load.path) == (asked.lora_name, asked.lora_path) and not load.is_replaced:
                return number
        return None

    def _make_room(self, name: str) -> None:
        """Drop idle loads until there is room for one more. If the new load replaces an idle one of its name, there may
        be one load too many until the new one has been read, because the old one is kept until then."""
        for load in list(self._loads.values()):
            self._drop_replaced(load)  # its last hold may have been lost
        before = self._loads.get(self._current.get(name, 0))
        if before is not None and before.is_idle and len(self._loads) == self._max_loaded:
            return
        while len(self._loads) >= self._max_loaded:
            idle = next((load for load in self._loads.values() if load.is_idle and load is not before), None)
            if idle is None:
                raise AdaptersInUse(f"{self._max_loaded} adapters are loaded (max_cpu_loras), and requests use all of "
                                    "them: try again later, or raise max_cpu_loras")
            self._drop(idle)

    def _serve(self, load: AdapterLoad) -> None:
        """Serve a load that has been read: new requests get it instead of the earlier load of its name."""
        number = self._current.get(load.name, 0)
        if load.is_replaced or load.number < number:  # removed, or read again, while it was read
            self._replace(load)
            return
        self._current[load.name] = load.number
        if number:
            self._replace(self._loads[number])

    def _replace(self, load: AdapterLoad) -> None:
        load.is_replaced = True
        self._drop_replaced(load)

    def _drop_replaced(self, load: AdapterLoad) -> None:
        if load.is_replaced and load.is_idle:
            self._drop(load)

    def _drop(self, load: AdapterLoad) -> None:
        """Drop a load. If the call is interrupted it can be repeated: until its end the load stays known, and no
        request gets the load meanwhile."""
        load.is_replaced = True
        if load.number in self.sizes:  # no request has been checked with one that was never read
            self._dropped[load.number] = DroppedLoad(load.name, None if load.is_removed else load.path)
        if len(self._dropped) > MAX_DROPPED:
            self._dropped.popitem(last=False)
        self._slots().forget(load.number)
        self._order(DropAdapter(load.number))
        if self._current.get(load.name) == load.number:
            del self._current[load.name]
        self.sizes.pop(load.number, None)
        del self._loads[load.number]
        if all(other.part.cache_key != load.part.cache_key for other in self._loads.values()):
            self._labels.pop(load.part.cache_key, None)
