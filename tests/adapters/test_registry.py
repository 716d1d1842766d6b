"""Names and loads of adapters: which load serves a name, which ones make room, and what is remembered of dropped ones.
A worker that reads at once stands in for an engine's."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from outrider.core.checked_request import NO_REQUEST
from outrider.features.adapters import loads
from outrider.features.adapters.commands import AdapterRead, BeginAdapter, DropAdapter, PollAdapter
from outrider.features.adapters.loads import AdapterRegistry
from outrider.features.adapters.slots import AdapterSlots
from outrider.lora_request import AdapterHold, AdaptersInUse, LoadedAdapter, LoRARequest, UnknownAdapter


class Registry(AdapterRegistry):
    def __init__(self, max_loaded: int = 2) -> None:
        self.folders: dict[int, str] = {}  # of the loads that the worker holds
        sizes: dict[int, int] = {}
        slots = AdapterSlots(1, 10, sizes)
        super().__init__(max_loaded, 1, self._carry_out, lambda: slots, sizes, {})

    def _carry_out(self, command: Any) -> Future[Any]:
        done: Future[Any] = Future()
        match command:
            case BeginAdapter():
                self.folders[command.number] = command.folder
            case DropAdapter():
                self.folders.pop(command.number, None)
            case PollAdapter():
                assert command.number in self.folders
        done.set_result(AdapterRead(10) if isinstance(command, PollAdapter) else None)
        return done

    def load(self, name: str, folder: str = "", *, again: bool = False) -> AdapterHold:
        hold = self.begin(asked(name, folder, again=again))
        assert self.is_ready(hold.number)
        return hold

    def load_and_release(self, name: str, folder: str = "") -> int:
        hold = self.load(name, folder)
        self.release(hold)
        return hold.number


def asked(name: str, folder: str = "", *, again: bool = False) -> LoRARequest:
    return LoRARequest(name, 1, folder or f"/adapters/{name}", load_inplace=again)


def test_a_checked_request_gets_the_newest_folder_of_its_adapter_read_again() -> None:
    registry = Registry(max_loaded=1)
    first, _, second, _ = (registry.load_and_release(*each) for each in
                           (("a", "/old"), ("b", ""), ("a", "/new"), ("b", "")))
    assert list(registry.folders.values()) == ["/adapters/b"], "each made room for the next"
    hold = registry.hold(first)
    assert registry.folders == {hold.number: "/new"} and hold.number not in (first, second)


def test_a_checked_request_whose_adapter_was_removed_is_refused() -> None:
    registry = Registry(max_loaded=1)
    number = registry.load_and_release("a")
    registry.keep("a", "/adapters/a")
    registry.load_and_release("b")
    registry.remove("a")
    with pytest.raises(UnknownAdapter, match="has been removed: load the adapter again"):
        registry.hold(number)


def test_a_first_reading_that_a_front_gives_up_serves_the_next_one() -> None:
    registry = Registry()
    hold = registry.begin(asked("a"))
    registry.release(hold)
    assert registry.begin(asked("a")).number == hold.number


def test_the_load_that_is_served_makes_no_room_for_a_second_reload() -> None:
    registry = Registry(max_loaded=2)
    served = registry.load_and_release("a")
    registry.load_and_release("b")
    reading = registry.begin(asked("a", again=True))
    with pytest.raises(AdaptersInUse):
        registry.begin(asked("a", again=True))
    assert registry.newest(served) == served and reading.number in registry.folders


def test_an_older_reload_that_is_read_later_is_not_served() -> None:
    registry = Registry(max_loaded=4)
    older, newer = registry.begin(asked("a")), registry.begin(asked("a", again=True))
    for hold in (newer, older):
        assert registry.is_ready(hold.number)
    assert registry.begin(asked("a")).number == newer.number


def test_the_load_whose_requests_are_longest_gone_makes_room() -> None:
    registry = Registry(max_loaded=2)
    first, second = (registry.load_and_release(name) for name in "ab")
    request = NO_REQUEST.with_part(LoadedAdapter(first))
    registry.enter([request, NO_REQUEST])
    registry.leave(request)
    registry.load_and_release("c")
    assert first in registry.folders and second not in registry.folders


def test_dropped_loads_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "MAX_DROPPED", 3)
    registry = Registry(max_loaded=1)
    numbers = [registry.load_and_release(f"a{index}") for index in range(9)]
    assert list(registry._dropped) == numbers[-4:-1]


def test_a_reading_that_an_interrupt_has_left_behind_is_dropped() -> None:
    registry = Registry()
    held = registry.begin(asked("a"))
    lost = registry.begin(asked("b"))
    number = lost.number
    del lost
    registry.forget_requests()
    registry.drop_unused()
    assert list(registry.folders) == [held.number] != [number]
