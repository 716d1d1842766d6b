"""Which adapters are on the device: real sizes, least recently used ones go, and nothing overlaps. No tensors."""

from __future__ import annotations

import random

from outrider.core.adapter_orders import AdapterPlacement
from outrider.sched.adapter_slots import AdapterSlots

SIZES = {1: 40, 2: 30, 3: 30, 4: 100}


def test_adapters_take_their_real_size() -> None:
    slots = AdapterSlots(num_slots=3, capacity=100, sizes=SIZES)
    assert slots.start(1) and slots.start(2) and slots.start(3)
    assert slots.take_changes() == [AdapterPlacement(1, 0, 0), AdapterPlacement(2, 1, 40), AdapterPlacement(3, 2, 70)]
    assert slots.start(1) and not slots.take_changes(), "it is there already"
    slots.check_integrity()


def test_an_adapter_in_use_is_never_replaced() -> None:
    slots = AdapterSlots(num_slots=3, capacity=100, sizes=SIZES)
    assert slots.start(1) and slots.start(2)
    slots.end(1)
    assert not slots.start(4), "adapter 2 runs"
    slots.end(2)
    assert slots.start(4)
    assert [placed.number for placed in slots.take_changes()] == [4], "others need not be copied any more"
    slots.check_integrity()


def test_an_adapter_may_start_in_the_slot_of_one_that_nobody_runs_with() -> None:
    slots = AdapterSlots(num_slots=2, capacity=100, sizes=SIZES)
    assert slots.start(1) and slots.start(2)
    assert slots.may_start(1) and not slots.may_start(3), "both slots are in use"
    slots.end(1)
    assert slots.may_start(3) and slots.start(3) and not slots.may_start(1)


def test_the_least_recently_used_adapter_goes_first() -> None:
    slots = AdapterSlots(num_slots=2, capacity=100, sizes=SIZES)
    for number in (1, 2, 1):
        assert slots.start(number)
        slots.end(number)
    assert slots.start(3)
    slots.take_changes()
    assert slots.start(1) and not slots.take_changes(), "adapter 2 was replaced, and not 1"


def test_random_starts_and_ends_keep_every_adapter_apart() -> None:
    draw, running = random.Random(5), list[int]()
    sizes = {number: draw.randint(1, 40) for number in range(20)}
    slots = AdapterSlots(num_slots=5, capacity=90, sizes=sizes)
    num_full = 0
    for _ in range(2000):
        if running and draw.random() < 0.5:
            slots.end(running.pop(draw.randrange(len(running))))
        else:
            number = draw.randrange(20)
            if slots.start(number):
                running.append(number)
            else:
                num_full += 1
        slots.check_integrity()
    assert num_full > 100
    for number in running:
        slots.end(number)
    assert all(slots.start(number) or sizes[number] > 90 for number in (0,)), "with none running there is room"
