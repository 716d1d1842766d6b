"""When drafts are tried that have not paid so far: what is never tried is never seen to pay."""

from __future__ import annotations

PROBE_ALL_AFTER = 64  # steps without drafts until all requests try one, where one alone would cost as much as all
PROBE_DEPTH_AFTER = 128  # steps until all requests try one draft more than has paid
# Where the drafter rests while no request drafts, a new request tries a draft in so many steps before its own
# acceptance counts: every request, or one of so many while drafts are accepted too seldom.
TRY_STEPS, TRY_FEW = 8, 4
HOPELESS = 0.9  # acceptance that one draft each would need: no request tries
HARDLY = 0.7  # the part of the needed acceptance that is enough for every request to try


class ProposedDepth:
    """The most drafts of a request, step after step: what pays, no more than was proposed in the step before, and now
    and then one draft more, to see whether it pays by now."""

    def __init__(self, k: int, *, tries_from_rest: bool = True) -> None:
        """tries_from_rest: also where no draft pays."""
        self._k, self._tries_from_rest = k, tries_from_rest
        self.proposed = 0  # drafts that the last step proposed
        self._tried = 0  # drafts that the last step proposed for a try
        self._since = 0  # steps since the last try

    def next(self, best: int) -> int:
        """Drafts for the coming step, when `best` would pay."""
        now = max(min(best, self.proposed), self._tried)
        interval = PROBE_DEPTH_AFTER if best else PROBE_ALL_AFTER
        self._since += 1
        self._tried = 0
        if self._since >= interval and best < self._k and (best or self._tries_from_rest):
            self._since, self._tried = 0, best + 1
        self.proposed = max(best, self._tried)
        return now


class NewRequestTries:
    """The steps in which new requests try a draft, for a drafter that rests while no request drafts."""

    def __init__(self) -> None:
        self._left: dict[int, int] = {}  # by request
        self._num_requests = 0

    def meet(self, request_id: int, *, is_likely: bool) -> None:
        """Decide whether a request that is new will try drafts. is_likely: they are accepted often enough lately."""
        if request_id not in self._left:
            self._left[request_id] = TRY_STEPS if is_likely or self._num_requests % TRY_FEW == 0 else 0
            self._num_requests += 1

    def take(self, request_id: int, *, is_step: bool) -> bool:
        """Whether the request tries a draft now. is_step: this is a step with tokens of it, not of its prompt alone."""
        left = self._left[request_id]
        self._left[request_id] = max(0, left - is_step)
        return left > 0

    def forget(self, request_id: int) -> None:
        self._left.pop(request_id, None)
