"""SizedDrafts: chooses the number of drafts of each request in captured steps, which have fixed sizes.

On a GPU steps are captured, so there are only certain numbers of token rows: with more than 32 requests they are at
most 32 rows apart, with 9 to 32 requests they are multiples of the number of requests. The scheduler compares two ways
to fill a step. One gives all requests the same number of drafts. The other gives the token rows of a size to the drafts
that are most likely to be accepted, by the acceptance of each request, so that one request may get five drafts and
another none. Unequal numbers are used only if the acceptance of requests differs by more than chance, and if they gain
0.8%; the gain is corrected by how many of the drafts that were expected to be accepted were accepted. Up to 8 requests
have the same number, because further token rows cost nothing there. A request without drafts tries one now and then,
and all requests now and then try one more than has paid. If no draft pays and the drafter is an n-gram lookup, all
requests try one every 64 steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, zip_longest
from operator import itemgetter
from typing import NamedTuple, TypeAlias

import numpy as np

from outrider.core import ScheduledBatch
from outrider.core.costs import StepCosts
from outrider.core.decode_sizes import FEW, unequal_sizes
from outrider.core.draft_confidence import CHANCE_BITS, WEIGHT_BITS
from outrider.core.drafted_request import DraftedRequest
from outrider.speculation.acceptance import PATIENT
from outrider.speculation.draft_counts import DraftPlan, SettledDrafts, SharingPlan, clamp_drafts
from outrider.speculation.learned_drafts import LearnedDrafts
from outrider.speculation.observed_times import READING
from outrider.speculation.request_table import Floats, Ints
from outrider.speculation.spread_acceptance import STEADY, SpreadAcceptance
from outrider.speculation.time_looks import HOPE, LOOK_STEPS, TimeLooks

LEVEL_GAIN = 1.02  # what the device's choice of drafts must gain over that of the scheduler
SHARE_GAIN, KEEP_SHARING = 1.008, 0.998  # what unequal numbers must gain over one for all; the same while they are used
KEEP_SIZE = 0.99  # the size of the step before is kept if it is as good as this
LEARN_SPREAD_EVERY = 8  # steps
FORESIGHT_PRIOR = 64.0  # drafts that are taken as foreseen, beside those that were observed
FORESIGHT_DECAY, FORESIGHT_FADE = 0.9995, 0.95  # on what was observed: per request with drafts, per equal step
MAX_CHAINS = 256  # chains of drafts that stand for those of the next step, at most ...
CHAINS_EACH = 4  # ... and for each of its requests
HELD_STEPS = 4  # steps that a plan with drafts for many requests holds for: planning hundreds takes a millisecond
FIRST_GAIN = 0.85  # least gain before the first drafts are checked: a drafter that rests can learn nothing
WEIGH_LEVELS_EVERY = 8  # steps: the levels of hundreds of drafts are weighed, which takes as long as a plan


RateOf: TypeAlias = Callable[[float, int, int], float]


class DraftChoice(NamedTuple):
    """One possible choice for a step: the number of drafts over all requests, and the most drafts of a single
    request."""

    depth: int
    total: int


class HeldCounts(NamedTuple):
    """A plan for several steps of the same requests. It has the number of drafts of each request or, with `sharing`,
    the most drafts that the device may give to each."""

    request_ids: list[int]
    counts: list[int]
    depth: int  # the most drafts of a request
    last_step: int  # number of the last step that it holds for
    sharing: SharingPlan | None = None
    is_look: bool = False  # the steps are made to learn how long they take


class Foresight:
    """The ratio of accepted drafts to those expected to be accepted, over plans with unequal numbers of drafts.

    A request whose drafts were accepted for a while may now write another kind of text. Then fewer of the drafts that
    seemed likeliest are accepted, and one number for all requests is better."""

    def __init__(self) -> None:
        self._expected = self._accepted = 0.0

    @property
    def share(self) -> float:
        """Return the number of accepted drafts divided by the number expected to be accepted, at most 1."""
        return min(1.0, (self._accepted + FORESIGHT_PRIOR) / (self._expected + FORESIGHT_PRIOR))

    def observe(self, expected: float, num_accepted: int, num_requests: int = 1) -> None:
        """Count a step's drafts: how many were expected to be accepted, and how many were."""
        kept = FORESIGHT_DECAY**num_requests
        self._expected = self._expected * kept + expected
        self._accepted = self._accepted * kept + num_accepted

    def observe_each(self, drafts: Iterable[tuple[float, int]]) -> None:
        """Count the drafts of several requests one after the other: for each, how many were expected to be accepted,
        and how many were."""
        for expected, num_accepted in drafts:
            self._expected = self._expected * FORESIGHT_DECAY + expected
            self._accepted = self._accepted * FORESIGHT_DECAY + num_accepted

    def fade(self, num_steps: int) -> None:
        """Reduce the weight of past observations. Called in steps with equal counts of drafts, so that unequal counts
        are tried again later."""
        self._expected *= FORESIGHT_FADE**num_steps
        self._accepted *= FORESIGHT_FADE**num_steps


class SizedDrafts(LearnedDrafts):
    """Chooses the drafts of captured steps, which have fixed sizes. Either all requests get the same number, or the
    token rows of a size are distributed among the likeliest drafts: by the scheduler, from each request's acceptance,
    or by the device, from the drafter's confidence in the proposed drafts. Without a gain it is one number for all,
    whose graphs are captured at start-up. The drafter does not run while no request drafts."""

    acceptance: SpreadAcceptance

    def __init__(self, k: int, costs: StepCosts, *, misses_rests: bool = True) -> None:
        """misses_rests: whether the drafter has a network. The network's state lacks the tokens of steps that propose
        no drafts."""
        acceptance = SpreadAcceptance(k, PATIENT if misses_rests else STEADY)
        super().__init__(k, costs, acceptance, misses_rests=misses_rests)
        self._step = 0
        self._held = HeldCounts([], [], 0, 0)
        self._last = DraftChoice(0, 0)  # the last that was shared out
        self._expected: dict[int, tuple[int, float]] = {}  # of unequal counts by request: drafts, and accepted ones
        self._foresight = Foresight()
        self._level_foresight = Foresight()  # the same, of drafts that the device chose
        # The last drafts that were proposed, of all requests: request, levels of its drafts, their number.
        self._chains: deque[tuple[int, int, int]] = deque(maxlen=MAX_CHAINS)
        self._next_learning = self._next_weighing = 0  # numbers of steps
        self._looks = TimeLooks(k, self._times, misses_rests=misses_rests)
        self._has_checked = False  # some drafts
        self._reads_along = False  # the step proposes one draft only so that the drafter sees its tokens
        self._sampling = 0.0  # seconds of a logit row in the mean of the requests planned last

    def choose(self, requests: Sequence[DraftedRequest], is_exact: bool) -> DraftPlan:
        self._step += 1
        if self._reads_along:
            self._looks.spend()
            self._reads_along = False
        self._looks.next_step(is_awake=self._depth.proposed > 0)
        new = self._next_step(requests)
        request_ids = [request.id for request in requests]
        if self._step > self._held.last_step or request_ids != self._held.request_ids:
            self._held = self._plan(requests, request_ids, self._k)
        if self._held.is_look:
            self._looks.spend()
        counts, most, sharing = self._held.counts, self._held.depth, self._held.sharing
        trying, is_trying = self._trying_ids(requests), self._advance_tries(requests, new, most)
        depth = self._depth.next(max(most, int(is_trying)))
        if depth < most:  # no more was proposed before
            less_deep = self._held if self._held.is_look else self._plan(requests, request_ids, depth, looks=False)
            counts, sharing = [min(count, depth) for count in less_deep.counts], less_deep.sharing
        elif is_trying and not most:
            counts = [min(depth, int(own in trying)) for own in request_ids]
        elif depth > most:  # for a try: requests that have the most get one more
            counts = [count + (count == most) for count in counts]
        wanted = self._clamped(requests, counts, is_exact)
        if sharing is not None:
            sharing = sharing._replace(fixed_drafts=list(map(min, wanted, sharing.fixed_drafts)))
        return DraftPlan(wanted, self._depth.proposed, sharing)

    def _clamped(self, requests: Sequence[DraftedRequest], counts: Sequence[int], is_exact: bool) -> list[int]:
        """Reduce the number of drafts of each request to the number that it can have."""
        if is_exact or not self._sight.sees_all:
            return [clamp_drafts(request, count, is_exact)
                    if count and request.yields_tokens and self._sees(request) else 0
                    for request, count in zip(requests, counts, strict=True)]
        return [0 if not (count and request.yields_tokens) else
                count if (most := request.max_drafts) is None or count <= most else most
                for request, count in zip(requests, counts, strict=True)]

    def beside_prompts(self, plan: DraftPlan) -> DraftPlan:
        """Change the plan for a step with prompts. It proposes no more drafts than the next step, which probably has
        prompts too, would check. If drafts nearly pay, a resting drafter runs with one draft: otherwise it would miss
        the prompts of a growing batch, and could not draft for it later."""
        if plan.sharing is not None:
            self._depth.proposed = max(1, *plan.sharing.fixed_drafts)
            return DraftPlan(plan.sharing.fixed_drafts, self._depth.proposed)
        if not plan.num_wanted and self._misses_rests and self._looks.are_left and self._may_pay():
            self._depth.proposed, self._reads_along = 1, True
            return DraftPlan(plan.num_drafts, 1)
        return plan

    def begin(self, requests: Sequence[DraftedRequest]) -> int:
        num_wanted = super().begin(requests)
        if self._reads_along and not self._requests and (best := self._best_depth(requests)):
            self._reads_along = False  # the next step checks drafts of these requests alone
            self._depth.proposed = num_wanted = best
        return num_wanted

    def _may_pay(self) -> bool:
        """Whether drafts nearly save time for the requests of this step. True for a step without requests, about which
        nothing is known yet."""
        count = len(self._requests)
        if not count:
            return True
        rate, tokens = self._rate_of(self._requests), float(count)
        least = rate(tokens, 0, count) / HOPE
        for depth, gain in enumerate(self.acceptance.usual_gains, start=1):
            tokens += gain * count
            if rate(tokens, depth, count * (1 + depth)) > least:
                return True
        return False

    def observe(self, settled: Sequence[SettledDrafts], *, is_shared: bool = False) -> None:
        sees_all = self._sight.sees_all
        self._chains.extend([(request.id, request.levels, request.num_proposed) for request, _, _ in settled
                             if request.levels and (sees_all or self._sees(request))])
        self._note_tries(settled)
        self._has_checked = self._has_checked or any([result.num_drafted for _, result, _ in settled])
        if is_shared:
            self._level_foresight.observe(self._expected_of(settled),
                                          sum([result.num_accepted for _, result, _ in settled]), len(settled))
            self._learn_chances(settled)
            self._expect_waiting(settled)  # what was accepted of drafts that the device chose says too much of others
            return
        self._learn_chances(settled)
        if self._expected:
            planned = [(*self._expected.get(request.id, (0, 0.0)), result.num_accepted, num_scheduled)
                       for request, result, num_scheduled in settled]
            self._foresight.observe_each([(expected, num_accepted) for count, expected, num_accepted, num_scheduled
                                          in planned if count and count == num_scheduled])
        self.acceptance.observe([(request.id, num_scheduled, result.num_accepted)
                                 for request, result, num_scheduled in settled if num_scheduled])

    def _expected_of(self, settled: Sequence[SettledDrafts]) -> float:
        """Return how many of the checked drafts were expected to be accepted, by their drafter's confidence."""
        if not settled:
            return 0.0
        request_ids, levels, counts = zip(*[(request.id, request.checked_levels, result.num_drafted)
                                            for request, result, _ in settled], strict=True)
        factors = self.chances.factors(request_ids)
        return float(self.chances.gains_of_chains(factors, np.array(levels), np.array(counts)).sum())

    def observe_step(self, batch: ScheduledBatch, seconds: float) -> None:
        count, depth, wanted = batch.num_requests, max(batch.num_drafts, default=0), batch.drafting.num_wanted
        if max(batch.num_known, default=0) != 1:
            return
        if depth and depth != wanted:  # a time of two numbers
            return
        rows = batch.num_token_rows
        foreseen = (self._costs.step(rows, count) + self._costs.read(batch.bounds) + rows * self._sampling
                    + self._costs.draft(wanted, count))
        self._times.observe(count, READING if wanted and not depth else depth, rows, foreseen, seconds)

    def _plan(self, requests: Sequence[DraftedRequest], request_ids: list[int], most: int, *,
              looks: bool = True) -> HeldCounts:
        """Plan the next steps with at most `most` drafts for a request. looks: whether the plan may be made only to
        measure the time of a number of drafts."""
        choice, rate, gains = self._plan_by_acceptance(requests, request_ids, most,
                                                       learns=self._step >= self._next_learning)
        if looks and (look := self._look(requests, request_ids, choice.depth, rate)) is not None:
            return look
        if not choice.depth and self._misses_rests and self._depth.proposed:  # before the drafter rests
            choice, rate, gains = self._plan_by_acceptance(requests, request_ids, most, learns=True)
        shared = self._best_by_levels(requests, most, rate)
        if shared is not None:
            self._expected.clear()
            fixed_drafts = [round(choice.total / len(requests))] * len(requests)
            last_step = self._step + WEIGH_LEVELS_EVERY - 1
            return HeldCounts(request_ids, [shared.depth] * len(requests), shared.depth, last_step,
                              self._sharing(request_ids, shared.total, fixed_drafts))
        num_steps = HELD_STEPS if choice.depth and len(requests) > FEW else 1  # a drafter rests and wakes at once
        self._level_foresight.fade(num_steps)
        if choice.total == choice.depth * len(requests):
            self._foresight.fade(num_steps)
            self._expected.clear()
            return HeldCounts(request_ids, [choice.depth] * len(requests), choice.depth, self._step + num_steps - 1)
        counts = self._share_out(requests, gains, choice)
        self._expected = {request_id: (count, sum(own[:count]))
                          for request_id, count, own in zip(request_ids, counts, gains, strict=True)}
        return HeldCounts(request_ids, counts, choice.depth, self._step + HELD_STEPS - 1)

    def _look(self, requests: Sequence[DraftedRequest], request_ids: list[int], depth: int,
              rate: float) -> HeldCounts | None:
        """Plan a few steps only to measure their time: steps with `depth` drafts, which seem best at `rate` tokens per
        second, or steps without the drafter. Returns None if the times are known well enough. With `depth` 0 the
        drafter still proposes one draft in each step, so that it misses no tokens."""
        count = len(requests)
        if not self._depth.proposed or not count or not self._looks.are_left:
            return None
        num_wanted = depth or 1
        if depth and self._looks.may_rest(count, lambda: self._rate_of(requests)(count, 0, count) / rate):
            depth = num_wanted = 0
        elif depth and not _all_decode(requests) or not self._looks.is_due(count, depth):
            return None
        self._expected.clear()
        last_step = self._step + LOOK_STEPS - 1
        self._looks.begin(depth)
        return HeldCounts(request_ids, [depth] * count, num_wanted, last_step, is_look=True)

    def _plan_by_acceptance(self, requests: Sequence[DraftedRequest], request_ids: list[int], most: int, *,
                            learns: bool) -> tuple[DraftChoice, float, list[list[float]]]:
        """Return the best choice by each request's acceptance, its tokens per second, and for each request the chances
        that its drafts are reached and accepted. learns: whether to estimate again how much requests differ."""
        if learns:
            self._next_learning = self._step + LEARN_SPREAD_EVERY
            self.acceptance.learn_spread(request_ids)
        gains = self._gains(requests, is_exact=False)
        return *self._best(requests, gains, most), gains

    def _best_depth(self, requests: Sequence[DraftedRequest]) -> int:
        return self._best(requests, self._gains(requests, is_exact=False), self._k)[0].depth

    def _rate_of(self, requests: Sequence[DraftedRequest]) -> RateOf:
        """Return a function that gives the tokens per second of a step of these requests. Its arguments: expected
        tokens, most drafts of a request, and token rows."""
        count, costs = len(requests), self._costs
        reading = costs.read([request.bound.at_most for request in requests])
        sampling = costs.sample([request.sampler_load for request in requests])  # one logit row each
        ratios = [self._times.ratio(count, depth) for depth in range(self._k + 1)]
        drafting = costs.drafts(self._k, count)
        self._sampling = sampling / count

        def rate(tokens: float, depth: int, rows: int) -> float:
            seconds = costs.step(rows, count) + reading + drafting[depth] + sampling * rows / count
            return tokens / (seconds * ratios[depth])

        return rate

    def _best(self, requests: Sequence[DraftedRequest], gains: list[list[float]],
              most: int) -> tuple[DraftChoice, float]:
        """Return the choice with the most expected tokens per second, of at most `most` drafts for a request, and its
        rate. Requests that still compute their prompts count too: they will run soon, and the drafter must process
        them."""
        count = len(requests)
        if not count:
            return DraftChoice(0, 0), 0.0
        rate, tokens = self._rate_of(requests), float(count)
        hopes = self._looks.hopes(count, is_awake=self._depth.proposed > 0, teaches=_all_decode(requests))
        best, best_rate = DraftChoice(0, 0), rate(tokens, 0, count) * hopes[0] * self._least_gain
        for depth, column in enumerate(islice(zip_longest(*gains, fillvalue=0.0), most), start=1):
            tokens += sum(column)
            own_rate = rate(tokens, depth, count * (1 + depth)) * hopes[depth]
            if own_rate > best_rate:
                best, best_rate = DraftChoice(depth, depth * count), own_rate
        best_rate /= hopes[best.depth]
        if count <= FEW or self.acceptance.are_alike:
            return best, best_rate
        padded = np.array([own + [0.0] * (self._k - len(own)) for own in gains])
        # Gains are drawn towards the mean of all requests, so unequal numbers are better than they seem.
        is_unequal = self._held.sharing is None and len(set(self._held.counts)) > 1
        least_gain = KEEP_SHARING if is_unequal else SHARE_GAIN
        shared = self._best_shared(rate, padded, self._foresight.share, most, count, best_rate, least_gain)
        return shared or (best, best_rate)

    @property
    def _least_gain(self) -> float:
        return FIRST_GAIN if self._misses_rests and not self._has_checked else super()._least_gain

    def _best_shared(self, rate: RateOf, gains: Floats, share: float, most: int, count: int,
                     best_rate: float, least_gain: float) -> tuple[DraftChoice, float] | None:
        """Return the best choice with unequal numbers of drafts, and its tokens per second; None if its gain over
        `best_rate`, the rate of other choices, is below `least_gain`. gains: as for `shared_choices`; share: a factor
        on the number of drafts that are expected to be accepted."""
        rates = {choice: rate(count + share * expected, choice.depth, count + choice.total)
                 for choice, expected in shared_choices(gains, most, count)}
        if not rates:
            return None
        choice = max(rates, key=rates.__getitem__)
        if self._last in rates and rates[self._last] > rates[choice] * KEEP_SIZE:
            choice = self._last  # its graph is there
        if rates[choice] <= best_rate * least_gain:
            return None
        self._last = choice
        return choice, rates[choice]

    def _best_by_levels(self, requests: Sequence[DraftedRequest], most: int, best_rate: float) -> DraftChoice | None:
        """Return the best choice in which the device distributes token rows among drafts. None if it gains too little
        over `best_rate`, the rate of other choices. The drafts of the next step are not known yet, so the rate is
        estimated from the last ones proposed."""
        count = len(requests)
        if self._misses_rests and not self._depth.proposed or self._step < self._next_weighing:
            return None
        # Masks are made by the host, which must know the logit rows.
        if count <= FEW or not all(request.yields_tokens and not request.input.is_masked for request in requests):
            return None
        if 2 * len(self._chains) < min(count, MAX_CHAINS):
            return None
        request_ids, *columns = zip(*list(self._chains)[-CHAINS_EACH * count :], strict=True)
        levels, num_drafts = (np.array(column, dtype=np.int64) for column in columns)
        waiting = self.chances.gains_of_chains(self.chances.factors(request_ids), levels, num_drafts)
        sample = extended(waiting, num_drafts, self.acceptance.gain_table(request_ids))
        shared = self._best_shared(self._rate_of(requests), sample, self._level_foresight.share, most, count, best_rate,
                                   LEVEL_GAIN)
        if shared is None:
            self._next_weighing = self._step + WEIGH_LEVELS_EVERY
            return None
        return shared[0]

    def _sharing(self, request_ids: list[int], total: int, fixed_drafts: list[int]) -> SharingPlan:
        chances, most = self.chances, (1 << WEIGHT_BITS + 3)
        factors = chances.factors(request_ids).tolist()
        weights = {one: min(round(own * (1 << WEIGHT_BITS)), most)
                   for one, own in zip(request_ids, factors, strict=True)}
        table = [min(round(chance * (1 << CHANCE_BITS)), 1 << CHANCE_BITS) for own in chances.table() for chance in own]
        return SharingPlan(total, weights, table, fixed_drafts)

    def _share_out(self, requests: Sequence[DraftedRequest], gains: list[list[float]],
                   choice: DraftChoice) -> list[int]:
        """Return the number of drafts of each request. A request that has had no drafts for a while tries one draft,
        which replaces the least likely draft of the step."""
        drafts = [(gain, index) for index, own in enumerate(gains) for gain in own[: choice.depth]]
        drafts.sort(key=itemgetter(0), reverse=True)
        del drafts[choice.total :]
        counts = [0] * len(requests)
        for _, index in drafts:
            counts[index] += 1
        due = [index for index, own in enumerate(gains)
               if own and not counts[index] and self.acceptance.is_probe_due(requests[index].id)]
        for index, (_, least_likely) in zip(due, reversed(drafts), strict=False):
            counts[least_likely] -= 1
            counts[index] = 1
        return counts


def _all_decode(requests: Sequence[DraftedRequest]) -> bool:
    return all([request.yields_tokens for request in requests])


def extended(waiting: Floats, num_waiting: Ints, usual: Floats) -> Floats:
    """Extend the gains (chances of being reached and accepted) of proposed drafts by gains of further drafts that could
    be proposed after them. A further draft that is reached has the usual chance of acceptance at its place. Arrays are
    indexed by chain and place."""
    width = usual.shape[1]
    last = np.minimum(num_waiting, width) - 1
    chains = np.arange(len(usual))
    reached, as_usual = (np.where(last < 0, 1.0, gains[chains, last])[:, None] for gains in (waiting, usual))
    further = reached * np.divide(usual, as_usual, out=np.zeros_like(usual), where=as_usual > 0)
    return np.where(np.arange(width) <= last[:, None], waiting, further)


def shared_choices(gains: Floats, most: int, count: int) -> Iterator[tuple[DraftChoice, float]]:
    """Yield the sizes of captured steps with unequal numbers of drafts for `count` requests, and for each size how many
    drafts are expected to be accepted. gains: the chances that drafts are reached and accepted, for each request or
    for a sample."""
    scale = len(gains) / count
    for depth in range(1, most + 1):
        drafts = gains[:, :depth]
        expected = np.cumsum(-np.sort(-drafts[drafts > 0]))
        for size in unequal_sizes(count, depth):
            at = max(1, round((size - count) * scale))
            if at > len(expected):
                break
            yield DraftChoice(depth, size - count), float(expected[at - 1]) / scale
