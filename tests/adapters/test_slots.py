"""Which adapters are on the device: real sizes, least recently used ones go, and nothing overlaps. No tensors."""

from __future__ import annotations

import random

from outrider.core.checked_request import NO_REQUEST, CheckedRequest
from outrider.features.adapters.placements import AdapterPlacement, AdapterPlacements
from outrider.features.adapters.slots import AdapterSlots
from outrider.lora_request import LoadedAdapter
from outrider.sched.row_resources import Room

SIZES = {1: 40, 2: 30, 3: 30, 4: 100}


def having(number: int) -> CheckedRequest:
    """A request with an adapter."""
    return NO_REQUEST.with_part(LoadedAdapter(number))


def test_adapters_take_their_real_size() -> None:
    slots = AdapterSlots(num_slots=3, capacity=100, sizes=SIZES)
    assert slots.room_for(NO_REQUEST) is Room.NOT_NEEDED
    assert slots.take(having(1)) and slots.take(having(2)) and slots.take(having(3))
    placed = (AdapterPlacement(1, 0, 0), AdapterPlacement(2, 1, 40), AdapterPlacement(3, 2, 70))
    assert slots.take_orders() == AdapterPlacements(placed)
    assert slots.take(having(1)) and slots.take_orders() is None, "it is there already"
    slots.check_integrity()


def test_an_adapter_in_use_is_never_replaced() -> None:
    slots = AdapterSlots(num_slots=3, capacity=100, sizes=SIZES)
    assert slots.take(having(1)) and slots.take(having(2))
    slots.give(having(1))
    assert not slots.take(having(4)), "adapter 2 runs"
    slots.give(having(2))
    assert slots.take(having(4))
    orders = slots.take_orders()
    assert orders is not None
    assert [placed.number for placed in orders.placements] == [4], "others need not be copied any more"
    slots.check_integrity()


def test_an_adapter_may_start_in_the_slot_of_one_that_nobody_runs_with() -> None:
    slots = AdapterSlots(num_slots=2, capacity=100, sizes=SIZES)
    assert slots.take(having(1)) and slots.take(having(2))
    assert slots.room_for(having(1)) is Room.FREE and slots.room_for(having(3)) is Room.TAKEN, "both slots are in use"
    slots.give(having(1))
    assert slots.room_for(having(3)) is Room.FREE and slots.take(having(3)) and slots.room_for(having(1)) is Room.TAKEN


def test_an_adapter_fills_a_gap_of_its_size() -> None:
    slots = AdapterSlots(num_slots=3, capacity=100, sizes=SIZES)
    assert all(slots.take(having(number)) for number in (1, 2, 3))
    slots.give(having(2))
    slots.forget(2)
    slots.take_orders()
    assert slots.take(having(2)), "between two adapters in use"
    assert slots.take_orders() == AdapterPlacements((AdapterPlacement(2, 1, 40),))


def test_the_least_recently_used_adapter_goes_first() -> None:
    slots = AdapterSlots(num_slots=2, capacity=100, sizes=SIZES)
    for number in (1, 2, 1):
        assert slots.take(having(number))
        slots.give(having(number))
    assert slots.take(having(3))
    slots.take_orders()
    assert slots.take(having(1)) and slots.take_orders() is None, "adapter 2 was replaced, and not 1"


def test_random_starts_and_ends_keep_every_adapter_apart() -> None:
    draw, running = random.Random(5), list[int]()
    sizes = {number: draw.randint(1, 40) for number in range(20)}
    slots = AdapterSlots(num_slots=5, capacity=90, sizes=sizes)
    num_full = 0
    for _ in range(2000):
        if running and draw.random() < 0.5:
            slots.give(having(running.pop(draw.randrange(len(running)))))
        else:
            number = draw.randrange(20)
            if slots.take(having(number)):
                running.append(number)
            else:
                num_full += 1
        slots.check_integrity()
    assert num_full > 100
    for number in running:
        slots.give(having(number))
    assert all(slots.take(having(number)) or sizes[number] > 90 for number in (0,)), "with none running there is room"
