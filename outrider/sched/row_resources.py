"""RowResource: a limited resource on the device that a request needs to run, beside a batch row and cache pages.

No torch.

A feature gives the scheduler its resources, such as a fixed number of slots on the device. A request waits while a
resource that it needs is used up, and other requests may start before it. Once it has waited long, no other request of
any tenant that needs a resource may start before it."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from outrider.core.checked_request import CheckedRequest
from outrider.core.feature_parts import BatchPart
from outrider.sched.request import Request
from outrider.sched.shares import Tenant

MAX_WITHOUT_ROOM = 128  # requests that wait for room and are passed over in a step
PATIENCE = 256  # steps for which others may overtake a request that waits for room


class Room(enum.Enum):
    NOT_NEEDED = "the request needs none"
    FREE = "there may be room"
    TAKEN = "running requests have all of it"


class RowResource(ABC):
    @abstractmethod
    def room_for(self, asked: CheckedRequest) -> Room:
        """Whether the request needs the resource, and whether some of it may be free. Changes nothing; `take`
        decides."""

    @abstractmethod
    def take(self, asked: CheckedRequest) -> bool:
        """Take the resource for a request that needs it and gets a row. Returns False if nothing of the resource is
        free yet."""

    @abstractmethod
    def give(self, asked: CheckedRequest) -> None:
        """Give the resource back. Called when a request that has taken it ends or is preempted."""

    @abstractmethod
    def forget_all(self) -> None:
        """Forget the state of the device's resource. Called when no request runs."""

    @abstractmethod
    def take_orders(self) -> BatchPart | None:
        """Return the orders that the device must carry out before the next step, and forget them."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Assert that no part of the resource is lost or has two owners."""


class RowResources:
    """All resources of a scheduler."""

    def __init__(self, resources: Sequence[RowResource] = ()) -> None:
        self.all = tuple(resources)

    def room_for(self, asked: CheckedRequest) -> Room:
        rooms = [resource.room_for(asked) for resource in self.all]
        return next((room for room in (Room.TAKEN, Room.FREE) if room in rooms), Room.NOT_NEEDED)

    def take(self, asked: CheckedRequest) -> bool:
        """Take every resource that the request needs, or none of them."""
        taken: list[RowResource] = []
        for resource in self._needed(asked):
            if not resource.take(asked):
                for other in taken:
                    other.give(asked)
                return False
            taken.append(resource)
        return True

    def give(self, asked: CheckedRequest) -> None:
        for resource in self._needed(asked):
            resource.give(asked)

    def forget_all(self) -> None:
        for resource in self.all:
            resource.forget_all()

    def take_orders(self) -> tuple[BatchPart, ...]:
        return tuple(orders for resource in self.all if (orders := resource.take_orders()) is not None)

    def check_integrity(self) -> None:
        for resource in self.all:
            resource.check_integrity()

    def _needed(self, asked: CheckedRequest) -> list[RowResource]:
        return [resource for resource in self.all if resource.room_for(asked) is not Room.NOT_NEEDED]


class Overdue:
    """Remembers the one request that no other may overtake, because it has waited long for a resource. While all
    requests are of one tenant, there is no such request."""

    def __init__(self) -> None:
        self._request: Request | None = None

    def note(self, request: Request, step: int, tenants: AbstractSet[Tenant]) -> bool:
        """Note that a resource had no room for the request in this step. tenants: all tenants that have requests.
        Returns whether the request has waited for long."""
        is_late = step - request.arrived_at >= PATIENCE
        if is_late and self._request is None and tenants != {request.input.tenant}:
            self._request = request
        return is_late

    def holds_up(self, request: Request) -> bool:
        """Whether this request must not take a resource now, because another request is overdue."""
        return self._request is not None and self._request is not request

    def forget(self, request: Request) -> None:
        """Forget a request that starts or has ended."""
        if request is self._request:
            self._request = None

    def forget_all(self) -> None:
        self._request = None
