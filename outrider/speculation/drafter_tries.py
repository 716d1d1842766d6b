"""Decides when to try drafts although they have saved no time so far. Without tries, the engine would never notice that
drafts save time now.

A drafter with a network rests (does not run) while no draft saves time, and steps without drafts record no hidden
states for it. It misses the tokens of these steps, so its first drafts in the middle of a text are nearly always wrong.
Of the drafts of `smollm2`'s first head that would be right without a rest, 2% are right just after it, a third 4 to 8
tokens later, two thirds after 16 to 24 tokens and 80% after 24 to 40.

So drafts are tried in two ways. A new request tries one draft a step for eight steps, from its prompt on. In long
answers the drafter first runs for 32 steps whose drafts are not checked; then all requests try some drafts. Together,
tries may cost 1% of the time, by measured costs minus what accepted drafts save: the smaller the loss, the more are
tried.

New requests start a resting drafter at once if requests lately accepted enough drafts to save time. A request goes on
drafting as long as this is no slower than decoding without drafts. That is judged by its own acceptance, which after 16
drafts counts as much as that of all others, and sooner if it differs from theirs."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from outrider.core.costs import StepCosts
from outrider.core.drafted_request import DraftedRequest
from outrider.speculation.observed_times import READING, ObservedTimes

PROBE_ALL_AFTER = 64  # steps without drafts until all requests try one, if the drafter misses nothing while it rests
PROBE_DEPTH_AFTER = 128  # steps until all requests try one draft more than has paid
TRY_STEPS = 8  # steps with a draft that a try has
READ_STEPS = 32  # steps that the drafter reads along before requests try drafts that it has not seen from the start
TRY_SHARE = 0.01  # of the time without drafts that tries may cost
MOST_SAVED = 40  # steps whose time tries may cost at once, after long rests
LEAST_COST = 0.1  # of what a try would cost if all its drafts were rejected, however good they seem to be
HOPELESS = 0.9  # acceptance that drafts would need: none are tried


class ProposedDepth:
    """Chooses how many drafts a request may have at most in each step: the number that saves time, but no more than the
    last step proposed. Sometimes it allows one more draft, to learn whether that draft saves time now."""

    def __init__(self, k: int, *, tries_from_rest: bool) -> None:
        """tries_from_rest: whether one more draft is tried even when no draft saves time."""
        self._k, self._tries_from_rest = k, tries_from_rest
        self.proposed = 0  # drafts that the last step proposed
        self._tried = 0  # drafts that the last step proposed for a try
        self._since = 0  # steps since the last try

    def next(self, best: int) -> int:
        """Return the most drafts of a request in the next step. best: the number of drafts that saves most time."""
        now = max(min(best, self.proposed), self._tried)
        interval = PROBE_DEPTH_AFTER if best else PROBE_ALL_AFTER
        self._since += 1
        self._tried = 0
        if self._since >= interval and best < self._k and (best or self._tries_from_rest):
            self._since, self._tried = 0, best + 1
        self.proposed = max(best, self._tried)
        return now


class DrafterSight:
    """Tracks for which requests a drafter has processed enough tokens to draft: all since the request's first step, or
    those of the last `READ_STEPS` steps."""

    def __init__(self, *, misses_rests: bool) -> None:
        """misses_rests: whether the drafter keeps a state of the text, which lacks the tokens of steps that propose no
        drafts."""
        self._misses_rests = misses_rests
        self._step = 0
        self._awake_since: int | None = None  # number of the step; None while it rests
        self._began: dict[int, int] = {}  # number of the step in which each request began
        self.sees_all = not misses_rests  # the drafter has seen enough of every request

    def next_step(self, num_wanted: int) -> None:
        """Begin a step. num_wanted: drafts that the step before proposes."""
        if not num_wanted:
            self._awake_since = None
        elif self._awake_since is None:
            self._awake_since = self._step
        self._step += 1
        awake = self._awake_since
        self.sees_all = not self._misses_rests or awake is not None and self._step - awake > READ_STEPS

    def new_of(self, requests: Sequence[DraftedRequest]) -> list[DraftedRequest]:
        """Return those of the requests for which `begin` was not called yet."""
        began = self._began
        return [request for request in requests if request.id not in began]

    def begin(self, request_id: int) -> None:
        """Note that the first tokens of the request are computed in this step, perhaps again after a preemption."""
        self._began[request_id] = self._step

    def forget(self, request_id: int) -> None:
        self._began.pop(request_id, None)

    def sees(self, request_id: int) -> bool:
        """Whether the drafter has processed enough tokens of the request, if it proposes drafts in this step."""
        since = self._step if self._awake_since is None else self._awake_since
        return self.sees_all or self._began.get(request_id, -1) >= since


class DrafterTries:
    """Decides in which steps requests try drafts although the drafter rests (does not run). Tries take at most
    `TRY_SHARE` of the time."""

    def __init__(self, costs: StepCosts, times: ObservedTimes) -> None:
        self._costs, self._times = costs, times
        self.slowness = 1.0  # factor on the time that drafts add
        self._saved = 0.0  # seconds that tries may cost
        self._token_seconds = 0.0  # that an accepted draft of the last try saves
        self._left: dict[int, int] = {}  # steps of tries by request

    def rest(self, num_requests: int) -> None:
        """Note a step of `num_requests` requests without drafts. Each such step adds to the time that tries may
        cost."""
        step = self._costs.step(num_requests, num_requests) * self._times.ratio(num_requests, 0)
        self._saved = min(self._saved + TRY_SHARE * step, MOST_SAVED * step)

    def allow(self, num_requests: int) -> None:
        """Allow a try now, although earlier steps have not yet added enough time for it, because drafts may save time
        since the machine's speed has changed."""
        step = self._costs.step(num_requests, num_requests) * self._times.ratio(num_requests, 0)
        self._saved = max(self._saved, MOST_SAVED * step)

    def begin(self, request_ids: Collection[int], num_requests: int, rate: float, *, num_reading: int = 0) -> bool:
        """Begin a try: these requests, out of `num_requests` requests, get drafts for a few steps. Does nothing and
        returns False if the try would take more time than tries may cost now. rate: recent acceptance. num_reading:
        steps before the try in which the drafter runs and no drafts are checked."""
        costs, count = self._costs, len(request_ids)
        plain, reading, drafted = (self._times.ratio(num_requests, depth) for depth in (0, READING, 1))
        step, drafting = plain * costs.step(num_requests, num_requests), costs.draft(1, num_requests)
        most = self.slowness * (drafted * (costs.step(num_requests + count, num_requests) + drafting) - step)
        token_seconds = step / num_requests  # what an accepted draft saves
        if most > HOPELESS * count * token_seconds:
            return False
        each_read = self.slowness * max(0.0, reading * (costs.step(num_requests, num_requests) + drafting) - step)
        read = each_read * (1 + num_reading)
        if TRY_STEPS * max(LEAST_COST * most, most - rate * count * token_seconds) + read > self._saved:
            return False
        self._saved -= TRY_STEPS * most + read
        self._token_seconds = token_seconds
        for request_id in request_ids:
            self._left[request_id] = num_reading + TRY_STEPS
        return True

    @property
    def any_left(self) -> bool:
        return bool(self._left)

    def has(self, request_id: int) -> bool:
        return request_id in self._left

    def take(self, request_id: int) -> None:
        """Count one step of the request's try."""
        self._left[request_id] -= 1
        if not self._left[request_id]:
            del self._left[request_id]

    def accept(self, request_id: int, num_accepted: int) -> None:
        """Add the time that accepted drafts of a try have saved to the time that tries may cost."""
        if num_accepted and request_id in self._left:
            self._saved += num_accepted * self._token_seconds

    def forget(self, request_id: int) -> None:
        self._left.pop(request_id, None)
