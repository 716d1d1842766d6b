"""Suspects: finds out which request makes steps fail. No torch, no tokens, no pages.

A step may fail by chance, or because of one request's data. The requests of a failed step are suspects. A request is
cleared when it is computed further than that step would have computed it:

    first failure    the suspects are computed again, in steps with all other requests
    second failure   the requests of that step are tried in two halves, one after the other, without all others
    a half fails     it is halved again, and so on; a request that fails twice alone is ended with an error

So a request that fails whenever it runs takes part in at most 3 + log2(requests) failed steps, and other requests in
fewer. If steps fail only because they have too many requests for the memory, both halves pass. Each time that happens
again, the halves run separately for longer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping

MAX_FAILURES = 50  # failed steps after which a request ends, even if no trial has found it guilty


class Everyone(Container[int]):
    """A set that contains every request, for the time when no request is on trial."""

    def __contains__(self, request: object) -> bool:
        return True


EVERYONE = Everyone()


class Suspects:
    def __init__(self) -> None:
        self._points: dict[int, int] = {}  # by request: computed tokens with which it is cleared
        self._trials: list[list[int]] = []  # requests that run without others; the first of them now
        self._failed_alone: set[int] = set()  # suspects that were the only request of a failed step
        self._num_failures: Counter[int] = Counter()  # by request, over its whole life
        self._num_acquittals: Counter[int] = Counter()  # trials that it has passed

    def __bool__(self) -> bool:
        return bool(self._points or self._trials)

    @property
    def on_trial(self) -> Container[int]:
        """Return the requests that may run now. Without a trial, all requests may run."""
        return self._trials[0] if self._trials else EVERYONE

    @property
    def has_trial(self) -> bool:
        return bool(self._trials)

    def fail(self, points: Mapping[int, int]) -> list[int]:
        """Record a failed step. `points`: for each of its requests, the most computed tokens it would have had
        after the step. Returns the requests that must end."""
        requests = list(points)
        is_repeated = any(request in self._points for request in requests)
        self._points |= {request: point + self._extension(request) for request, point in points.items()}
        self._num_failures.update(requests)
        if len(requests) == 1 and requests[0] in self._failed_alone:
            return requests
        if is_repeated:
            half = len(requests) // 2
            others = [[r for r in trial if r not in points] for trial in self._trials]
            self._trials = [trial for trial in (requests[:half], requests[half:], *others) if trial]
        if len(requests) == 1:
            self._failed_alone.add(requests[0])
        return [request for request in requests if self._num_failures[request] >= MAX_FAILURES]

    def forget(self, request: int) -> None:
        """Forget a request that has ended."""
        self._points.pop(request, None)
        self._failed_alone.discard(request)
        self._num_failures.pop(request, None)
        self._num_acquittals.pop(request, None)

    def clear(self, computed: Mapping[int, int]) -> bool:
        """Clear the suspects that are computed further than the failed step would have computed them. `computed`:
        settled tokens of each request. Returns whether the requests on trial have changed."""
        self._points = {request: point for request, point in self._points.items() if computed[request] < point}
        self._failed_alone &= self._points.keys()
        before = self.on_trial
        while self._trials and not any(request in self._points for request in self._trials[0]):
            self._num_acquittals.update(request for request in self._trials.pop(0) if request in computed)
        return self.on_trial is not before

    def _extension(self, request: int) -> int:
        """Tokens beyond the failed step that the request must compute to be cleared."""
        passed = self._num_acquittals[request]
        return 4 ** (passed + 1) if passed else 0
