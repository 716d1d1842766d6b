"""The line of waiting requests: the order of those that are left, and the work of removing thousands."""

from __future__ import annotations

import random
from typing import Any, cast

import pytest

from outrider.sched.request import Request
from outrider.sched.waiting import Line, WaitingRequests


class Asked:
    def __init__(self, tenant: str, priority: int) -> None:
        self.tenant, self.priority = tenant, priority


class Waiting:
    """Stands for a request; counts how often requests are looked at."""

    num_looks = 0

    def __init__(self, index: int, tenant: str = "a", priority: int = 0) -> None:
        self._id, self.input = index, Asked(tenant, priority)

    @property
    def id(self) -> int:
        Waiting.num_looks += 1
        return self._id


def waiting_request(*args: Any) -> Request:
    return cast(Request, Waiting(*args))


@pytest.mark.parametrize("order", ["first to last", "last to first", "random"])
def test_the_work_of_removing_all_grows_with_their_number(order: str) -> None:
    """A client that leaves may take 32768 samples along, and no request of another tenant is served meanwhile."""
    line, num = Line(), 4000
    requests = [waiting_request(index) for index in range(num)]
    for index, request in enumerate(requests):
        line.push(((0, index), request))
    if order == "random":
        random.Random(1).shuffle(requests)
    Waiting.num_looks = 0
    for request in requests if order != "last to first" else reversed(requests):
        line.remove(request)
    assert not line and Waiting.num_looks < 10 * num


def test_those_that_are_left_come_in_order() -> None:
    source, waiting = random.Random(2), WaitingRequests()
    known: dict[int, tuple[tuple[int, int], Request]] = {}  # rank and request by id
    for index in range(3000):
        action = source.random()
        if action < 0.5 or not known:
            request = waiting_request(index, source.choice("ab"), source.randrange(3))
            waiting.arrive(request)
            known[index] = (request.input.priority, index), request
        elif action < 0.8:
            waiting.remove(known.pop(source.choice(list(known)))[1])
        elif action < 0.95:
            tenant = source.choice(list(waiting.tenants))
            popped = waiting.pop(tenant)
            first = min((own for own in known.values() if own[1].input.tenant == tenant), key=lambda own: own[0])[1]
            assert popped is first
            if source.random() < 0.5:
                del known[popped.id]
            else:
                waiting.push(popped)
        else:
            on_trial = set(source.sample(list(known), len(known) // 2))
            waiting.hold_back_all_but(on_trial)
            assert {request.id for request in waiting.ready} == on_trial
            waiting.remove(known.pop(source.choice(list(known)))[1])
            waiting.hold_back_all_but(range(3000))
        assert len(waiting) == waiting.num_ready == len(known) == len(list(waiting.ready))
        assert sum(waiting.tenants.values()) == len(known) and all(waiting.tenants.values())
