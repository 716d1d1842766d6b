"""QueueBound: the number of samples that may be in the engine at once, and the error for requests beyond it.

Samples are counted, not requests, because a request for n samples takes n batch rows. They are counted in the event
loop, so that a request is refused before it is tokenized. A full queue refuses only tenants that already have an equal
share of the queue, so one tenant's requests never keep out another's.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from outrider.server.errors import ApiError

MAX_WAIT = 60  # seconds, the most that Retry-After says


class QueueBound:
    def __init__(self, max_queued: int) -> None:
        self.num_live = 0  # samples of requests that have not been answered
        self._live: Counter[str | None] = Counter()  # samples by tenant; none of them is 0
        self._max_queued = max_queued
        self._mean_seconds = 1.0  # a request takes, over the last few

    @contextmanager
    def admit(self, num_samples: int, max_running: int, tenant: str | None = None) -> Iterator[None]:
        """Raise the error 429 if the samples would make the queue longer than allowed. tenant: the API key of the
        request; None if the server has no keys, or the key is unknown."""
        if self._is_full(num_samples, max_running + self._max_queued, tenant):
            raise self._refusal(max_running)
        self.num_live += num_samples
        self._live[tenant] += num_samples
        began = time.monotonic()
        try:
            yield
        finally:
            self.num_live -= num_samples
            self._live[tenant] -= num_samples
            if not self._live[tenant]:
                del self._live[tenant]
            self._mean_seconds += 0.1 * (time.monotonic() - began - self._mean_seconds)

    def check_room(self, max_running: int, num_keys: int) -> None:
        """Raise the error 429 if no API key could add a sample to the queue. This decides whether the server is ready.
        If one key alone fills the queue, the server stays ready: otherwise a load balancer would send it no requests of
        other keys."""
        if len(self._live) < num_keys:
            return
        if all(self._is_full(1, max_running + self._max_queued, tenant) for tenant in self._live or (None,)):
            raise self._refusal(max_running)

    def _refusal(self, max_running: int) -> ApiError:
        return ApiError(429, f"{self.num_live} samples are running or waiting, and at most {max_running} run and "
                             f"{self._max_queued} wait: try again later", retry_after=self._wait(max_running))

    def _is_full(self, num_samples: int, most: int, tenant: str | None) -> bool:
        if not self.num_live or self.num_live + num_samples <= most:
            return False
        share = most // len(self._live.keys() | {tenant})
        return tenant is None or self._live[tenant] + num_samples > max(1, share)

    def _wait(self, max_running: int) -> int:
        """Estimate the seconds until about one batch of requests has left the queue."""
        return max(1, min(MAX_WAIT, round(self._mean_seconds * self.num_live / max_running)))
