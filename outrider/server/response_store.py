"""ResponseStore: stored responses that clients retrieve, continue or delete. They are kept in memory only, and their
number and size are bounded.

Every API key has separate responses and separate bounds: no client sees or displaces the responses of another key. The
oldest responses are dropped first.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any, NamedTuple

from outrider.core.fields import shown
from outrider.server.bodies import MAX_VALUES
from outrider.server.body_values import count_values
from outrider.server.errors import ApiError
from outrider.server.stored_images import StoredImage, StoredImages, distinct_bytes
from outrider.server.work import compact

# JSON of the responses of one key. Items that several responses share count for each of them, images count once.
MAX_BYTES = 64 << 20
MAX_ITEMS = 1 << 18  # of the responses of one key, counted as bytes are: an item has some 300 bytes beside its JSON
MAX_SECONDS = 24 * 3600.0


class StoredItem(NamedTuple):
    id: str
    json: bytes
    num_values: int = 0  # in the JSON: reading it takes as long as these do
    images: tuple[StoredImage, ...] = ()  # for whose marks in the JSON they are

    @classmethod
    def from_json(cls, item: dict[str, Any], images: tuple[StoredImage, ...] = ()) -> StoredItem:
        written = compact(item).encode()
        return cls(item["id"], written, count_values(written, MAX_VALUES), images)

    @property
    def whole_json(self) -> bytes:
        """Return the response's JSON with its images restored."""
        return reduce(lambda json, image: image.restored_in(json), self.images, self.json)


@dataclass(frozen=True)
class StoredResponse:
    id: str
    json: bytes  # the response, as its client got it
    input: tuple[StoredItem, ...]  # all that the model was given, items of earlier responses included
    output: tuple[StoredItem, ...]
    cache_session: str | None = None

    @cached_property
    def num_bytes(self) -> int:
        return len(self.json) + sum(len(item.json) for item in (*self.input, *self.output))

    @cached_property
    def images(self) -> tuple[StoredImage, ...]:
        return tuple({image.digest: image for item in self.input for image in item.images}.values())

    @property
    def num_items(self) -> int:
        return len(self.input) + len(self.output)


class ResponseStore:
    """The stored responses of one event loop. `max_responses`: the most responses for each key; 0 stores none."""

    def __init__(self, max_responses: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_on = max_responses > 0
        self._max_responses, self._clock = max_responses, clock
        self.images = StoredImages()
        # By tenant, then by id, the oldest first, with the time when a response was stored.
        self._responses: dict[str | None, dict[str, tuple[float, StoredResponse]]] = {}

    def keeps(self, asked: bool | None) -> bool:
        """Whether to store a response if its body has `asked` in the field `store`."""
        return self.is_on and asked is not False

    def add(self, tenant: str | None, response: StoredResponse) -> None:
        """Store a response, unless it alone is larger than the space of a key."""
        self._forget_old()
        if response.num_bytes + distinct_bytes(response.images) > MAX_BYTES or response.num_items > MAX_ITEMS:
            return
        own = self._responses.setdefault(tenant, {})
        own[response.id] = self._clock(), response
        num_bytes = sum(kept.num_bytes for _, kept in own.values())
        num_items = sum(kept.num_items for _, kept in own.values())
        while (len(own) > self._max_responses or num_items > MAX_ITEMS
               or num_bytes + distinct_bytes(image for _, kept in own.values() for image in kept.images) > MAX_BYTES):
            _, oldest = own.pop(next(iter(own)))
            num_bytes, num_items = num_bytes - oldest.num_bytes, num_items - oldest.num_items

    def find(self, tenant: str | None, response_id: str, param: str = "response_id") -> StoredResponse:
        """Find a stored response. `param`: the field that names the response, for the error if it is not found."""
        self._forget_old()
        found = self._responses.get(tenant, {}).get(response_id)
        if found is None:
            raise ApiError(404, f"Response with id {shown(response_id)} not found: {param} must be that of a response "
                                "that this key stored within the last day, and that was neither deleted nor displaced "
                                "by newer ones", param=param)
        return found[1]

    def delete(self, tenant: str | None, response_id: str) -> None:
        self.find(tenant, response_id)
        del self._responses[tenant][response_id]

    def _forget_old(self) -> None:
        limit = self._clock() - MAX_SECONDS
        for own in self._responses.values():
            while own and own[first := next(iter(own))][0] < limit:
                del own[first]
