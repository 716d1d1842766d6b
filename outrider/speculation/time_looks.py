"""TimeLooks: decides when to make a few steps with a certain number of drafts only to measure how long they take (a
look).

The costs measured at start-up have an error, similar for neighbouring numbers of drafts and batch sizes. So a number
that was not tried is expected to have the error of the nearest one, and is rated a little better than that. If this
makes it the best, a few steps with it show the true time. A budget of steps limits looks. A drafter with a network is
not stopped because of a guess: first, a look measures steps in which it runs and no drafts are checked.
"""

from __future__ import annotations

from collections.abc import Callable

from outrider.speculation.observed_times import ObservedTimes

LOOK_STEPS = 4  # that a look takes: the first may still propose what the others check
AFTER_LOOK = 4  # steps until all times of a look are known
MOST_LOOKS, NEW_LOOKS = 24.0, 1 / 32  # steps that looks may take at once, and that every step adds
HOPE = 1.25  # factor by which a depth whose times are not known may be better than it seems
REST_AFTER = 512  # steps with drafts until the drafter may rest to learn what steps without it take ...
MUCH_SLOWER = 2.0  # ... if those with it take so many times as long as foreseen


class TimeLooks:
    """Chooses depths (numbers of drafts) whose step times are to be measured by a look, within a budget of steps."""

    def __init__(self, k: int, times: ObservedTimes, *, misses_rests: bool) -> None:
        """misses_rests: whether the drafter misses the tokens of steps in which it does not run."""
        self._k, self._times, self._misses_rests = k, times, misses_rests
        self._left = MOST_LOOKS  # steps
        self._step = self._num_awake = 0
        self._looked: dict[int, int] = {}  # first step of the last look, by depth

    @property
    def are_left(self) -> bool:
        return self._left >= 1

    def next_step(self, *, is_awake: bool) -> None:
        """Begin a step. is_awake: whether the step before proposes drafts."""
        self._step += 1
        self._left = min(self._left + NEW_LOOKS, MOST_LOOKS)
        self._num_awake += is_awake

    def spend(self) -> None:
        """Take one step from the budget of looks."""
        self._left -= 1

    def begin(self, depth: int) -> None:
        self._looked[depth] = self._step

    def is_due(self, count: int, depth: int) -> bool:
        """Whether to measure steps with this depth, which seems best for `count` requests. False if no step with about
        so many requests was seen yet: then the drafts are made without a look."""
        if not depth:
            return self._misses_rests and not self._times.estimate(count, 0).is_sure
        return self._times.is_any_known(count) and self._is_unsure(count, depth)

    def hopes(self, count: int, *, is_awake: bool, teaches: bool) -> list[float]:
        """Return a factor on the tokens per second of each depth: above 1 for depths whose times should be measured.
        teaches: whether the next steps' times can be used; those of steps with prompts cannot."""
        if not teaches or not self.are_left or not self._times.is_any_known(count):
            return [1.0] * (1 + self._k)
        hopes = [HOPE if self._is_unsure(count, depth) else 1.0 for depth in range(1 + self._k)]
        if not is_awake:
            hopes[0] = 1.0
        elif hopes[0] > 1:  # perhaps only drafts take longer than foreseen
            hopes[0] = max(HOPE, self._times.ratio(count, 0) / self._times.slowness)
        return hopes

    def may_rest(self, count: int, gain: Callable[[], float]) -> bool:
        """Whether to stop the drafter for a few steps, only to measure how long steps without it take. It is stopped if
        steps with it take much longer than predicted, while steps without it would be best if they took as long as
        predicted. (A host may be slower with a drafter, even if no drafts are checked.) gain: tokens per second without
        drafts, divided by the best known rate."""
        times = self._times
        if not self._misses_rests or self._num_awake < REST_AFTER or times.is_known(count, 0):
            return False
        slowness = times.ratio(count, 0) / times.slowness
        if slowness < MUCH_SLOWER or slowness * gain() < 1:
            return False
        self._num_awake = 0
        return True

    def _is_unsure(self, count: int, depth: int) -> bool:
        """Whether the time of this depth should be measured. False just after a look, because its times come some steps
        later."""
        looked = self._looked.get(depth)
        if looked is not None and self._step < looked + LOOK_STEPS + AFTER_LOOK:
            return False
        return not self._times.estimate(count, depth).is_sure
