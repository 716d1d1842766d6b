"""RequestKeeper: holds a feature's data about requests until they end. The engine calls every keeper when requests
arrive and end. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from outrider.core.checked_request import CheckedRequest
from outrider.core.feature_parts import find_part


class RequestKeeper:
    """Base class for a feature's data about running requests. A subclass overrides the methods that it needs; by
    default a method does nothing. All methods are called on the thread that calls `Engine.step`."""

    def renew(self, asked: CheckedRequest) -> CheckedRequest:
        """Update a request that is about to be added, because something may have changed since it was checked. Raises
        ValueError if it cannot be served any more."""
        return asked

    def enter(self, requests: Sequence[CheckedRequest]) -> None:
        """Called when these requests are added. Raises ValueError if one of them cannot be served; then nothing is kept
        for any of them."""

    def leave(self, asked: CheckedRequest) -> None:
        """Called when a request has ended."""

    def forget_requests(self) -> None:
        """Forget all requests. Called after an interrupt, which may have left the data of this keeper half changed.
        Requests that go on enter again, then `drop_unused` is called."""

    def drop_unused(self) -> None:
        """Drop data that no request uses any more. This completes changes that an interrupt may have cut off."""

    def close(self) -> None:
        """Called when the engine has ended, and all requests with it."""


Keeper = TypeVar("Keeper", bound=RequestKeeper)


class RequestKeepers:
    """All keepers of an engine. It has the methods of a RequestKeeper, each of which calls every keeper."""

    def __init__(self, keepers: Sequence[RequestKeeper] = ()) -> None:
        self._all = tuple(keepers)

    def find(self, kind: type[Keeper]) -> Keeper | None:
        """Return the keeper of this kind, or None."""
        return find_part(self._all, kind)

    def add(self, keeper: RequestKeeper) -> None:
        """Add the keeper of a feature, when the first request asks for the feature. Any thread may call this."""
        self._all = (*self._all, keeper)

    def renew(self, requests: Mapping[str, CheckedRequest]) -> Mapping[str, CheckedRequest]:
        for keeper in self._all:
            requests = {request_id: keeper.renew(asked) for request_id, asked in requests.items()}
        return requests

    def enter(self, requests: Sequence[CheckedRequest]) -> None:
        """Enter all requests in all keepers. If a keeper raises ValueError, no keeper keeps any of them."""
        entered: list[RequestKeeper] = []
        try:
            for keeper in self._all:
                keeper.enter(requests)
                entered.append(keeper)
        except Exception:
            for keeper in entered:
                for asked in requests:
                    keeper.leave(asked)
            raise

    def leave(self, *requests: CheckedRequest) -> None:
        for keeper in self._all:
            for asked in requests:
                keeper.leave(asked)

    def forget_requests(self) -> None:
        for keeper in self._all:
            keeper.forget_requests()

    def drop_unused(self) -> None:
        for keeper in self._all:
            keeper.drop_unused()

    def close(self) -> None:
        for keeper in self._all:
            keeper.close()
