"""Decides which numbers of drafts are tried for a few steps because it is not known how long their steps take.

The costs of start-up are wrong by some part, alike for neighbouring numbers of drafts and batch sizes. So a number that
was not seen is expected to take longer than foreseen by as much as the nearest one does, and is hoped to be a little
better than that. If this hope makes it the best, some steps with it show what is true. Looks are bounded by a budget of
steps. A drafter with a network does not rest because of a guess: before that it reads along in a look at steps whose
drafts are not checked.
"""

from __future__ import annotations

from outrider.speculation.observed_times import ObservedTimes

LOOK_STEPS = 4  # that a look takes: the first may still propose what the others check
AFTER_LOOK = 4  # steps until all times of a look are known
MOST_LOOKS, NEW_LOOKS = 24.0, 1 / 32  # steps that looks may take at once, and that every step adds
HOPE = 1.25  # factor by which a depth whose times are not known may be better than it seems
REST_AFTER = 512  # steps with drafts until the drafter may rest to learn what steps without it take ...
MUCH_SLOWER = 2.0  # ... if those with it take so many times as long as foreseen


class TimeLooks:
    """Looks at depths (numbers of drafts) whose times are not known, as far as their budget goes."""

    def __init__(self, k: int, times: ObservedTimes, *, misses_rests: bool) -> None:
        """misses_rests: whether the drafter misses what is written while it rests."""
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
        """Take a step from the budget."""
        self._left -= 1

    def begin(self, depth: int) -> None:
        self._looked[depth] = self._step

    def is_due(self, count: int, depth: int) -> bool:
        """Whether to look at this depth, which seems best for so many requests. The first drafts of all are no look."""
        if not depth:
            return self._misses_rests and not self._times.estimate(count, 0).is_sure
        return self._times.is_any_known(count) and self._is_unsure(count, depth)

    def hopes(self, count: int, *, is_awake: bool, teaches: bool) -> list[float]:
        """A factor on the rate of each depth: above 1 if its times are to be learned in the next steps. teaches: the
        times of the next steps tell something; those of steps with prompts do not."""
        if not teaches or not self.are_left or not self._times.is_any_known(count):
            return [1.0] * (1 + self._k)
        hopes = [HOPE if self._is_unsure(count, depth) else 1.0 for depth in range(1 + self._k)]
        if not is_awake:
            hopes[0] = 1.0
        elif hopes[0] > 1:  # perhaps only drafts take longer than foreseen
            hopes[0] = max(HOPE, self._times.ratio(count, 0) / self._times.slowness)
        return hopes

    def may_rest(self, count: int, gain: float) -> bool:
        """Whether to learn what steps without the drafter take, since they would be best if they took as long as
        foreseen: a host may be slower with a drafter, whether drafts are checked or not. gain: the rate of steps
        without drafts over the best rate, by what is known."""
        times = self._times
        if not self._misses_rests or self._num_awake < REST_AFTER or times.is_known(count, 0):
            return False
        slowness = times.ratio(count, 0) / times.slowness
        if slowness < MUCH_SLOWER or slowness * gain < 1:
            return False
        self._num_awake = 0
        return True

    def _is_unsure(self, count: int, depth: int) -> bool:
        """Whether the time of this depth is to be learned. What a look shows is known some steps later."""
        looked = self._looked.get(depth)
        if looked is not None and self._step < looked + LOOK_STEPS + AFTER_LOOK:
            return False
        return not self._times.estimate(count, depth).is_sure
