"""DraftSlowness: estimates how much longer drafts take than expected when other processes use the machine.

Costs are measured at start-up, when nothing else runs. Later another process may take a core or memory bandwidth, which
can slow the work for drafts more than the rest of a step. The number of drafts varies from step to step, so there are
times of steps with many and with few drafts under the same conditions. The estimate is the factor on the time of drafts
that explains all these times best. It is 1 until there is enough evidence; noisier times need more. If all steps have
equally many drafts, some steps without drafts are requested when the machine's speed has changed. While no drafts are
made the factor stays, until the machine's speed changes again."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

WINDOW = 32  # steps by which the factor is found
LAST, ENOUGH = 9, 5  # steps by which the machine's speed is judged, and below which it is not
CHANGE, CHANGE_DEVIATIONS = 0.2, 1.5  # logarithm of a speed that is another one, and deviations of single steps on top
SEVERE = 1.0  # logarithm of a slowness with which the drafter rests for looks, because these then tell far more
FORGET_AFTER = 512  # steps without drafts, after which what was found is no longer believed
LOOKS, MORE_LOOKS = 8, 16  # steps without checked drafts that are asked for after a change, unless fewer tell enough:
NEAR, APART = 2, 8  # the first of them every second step, more of them less often
SURE = 4.0  # evidence, as a logarithm, below which what was foreseen is believed
LEAST_NOISE = 0.05  # of one step's time, as a share of it
LEAST_SPREAD = 0.03  # of what drafts should add, as a share of a step: below, nothing can be told
USUAL_DEVIATION = 0.7  # of the factor's logarithm
STEP, LEAST_FACTOR, MOST_FACTOR = 1.25, 0.25, 32.0


class DraftSlowness:
    def __init__(self) -> None:
        self.factor = 1.0  # on the time that drafts add, beside the slowness of steps without drafts
        # What drafts should add, as a share of the step without them; the logarithm of its time over that foreseen.
        self._steps: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._level = 0.0  # logarithm of the machine's slowness when the factor was found
        self._looks_left = 0
        self._num_checking = 0  # steps since the last look
        self._found = 1.0  # the factor by which times agree best, whether there is enough evidence or not
        self._num_plain = 0  # steps in a row of an engine without drafts

    @property
    def wants_look(self) -> bool:
        """Whether the next step should check no drafts, so that its time can be compared with that of steps with
        drafts."""
        return self._looks_left > 0 and self._num_checking + 1 >= (NEAR if self._looks_left > MORE_LOOKS else APART)

    @property
    def wants_rest(self) -> bool:
        """Whether the drafter should not even run in the next step. On a very slow machine the time of a step without
        the drafter is worth more than the tokens that the drafter misses."""
        return self._looks_left > MORE_LOOKS and self._level > SEVERE

    def observe(self, plain: float, added: float, seconds: float, *, checks_drafts: bool) -> bool:
        """Note that a step has taken `seconds`. The expected time was `plain` seconds without drafts, plus `added`
        seconds for the drafts. Returns whether the machine's speed has changed."""
        if plain <= 0 or seconds <= 0:  # a clock that stands still
            return False
        self._steps.append((max(0.0, added / plain), math.log(seconds / plain)))
        self._num_plain = 0 if added else self._num_plain + 1
        is_looking = self._looks_left > MORE_LOOKS
        self._looks_left -= self._looks_left > 0 and not checks_drafts
        self._num_checking = self._num_checking + 1 if checks_drafts else 0
        if len(self._steps) < ENOUGH:
            return False
        level, deviation = self._speed()
        has_changed = abs(level - self._level) > CHANGE + CHANGE_DEVIATIONS * deviation
        if has_changed and not is_looking or self._num_plain > FORGET_AFTER and self.factor != 1.0:
            self._begin_anew()
            return True
        if self._num_plain <= ENOUGH:
            self._fit()
        return False

    def _speed(self) -> tuple[float, float]:
        """Return (median, deviation) of the logarithm of a step's actual time divided by its expected time, over the
        last steps."""
        last = [log - math.log1p(self.factor * x) for x, log in list(self._steps)[-LAST:]]
        level = median(last)
        return level, 1.5 * median([abs(own - level) for own in last])

    def _begin_anew(self) -> None:
        """Forget times from before the machine's speed changed. Steps without drafts are requested, unless the machine
        is as fast as expected again."""
        self._steps = deque(list(self._steps)[-ENOUGH:], maxlen=WINDOW)
        self.factor = self._found = 1.0
        self._num_plain = 0
        self._level, _ = self._speed()
        self._looks_left = LOOKS + MORE_LOOKS if abs(self._level) > CHANGE else 0

    def _fit(self) -> None:
        """Find the factor that explains the times best, unless all steps have nearly equal drafts."""
        added = [x for x, _ in self._steps]
        if max(added) - min(added) < LEAST_SPREAD:
            return
        least = self._doubt(self._found)
        for step in (STEP, 1 / STEP):
            while LEAST_FACTOR <= self._found * step <= MOST_FACTOR:
                doubt = self._doubt(self._found * step)
                if doubt >= least:
                    break
                self._found, least = self._found * step, doubt
        is_sure = self._doubt(1.0) - least > SURE
        self.factor = self._found if is_sure else 1.0
        if is_sure:
            self._level, _ = self._speed()
            self._looks_left = 0

    def _doubt(self, factor: float) -> float:
        """Return how unlikely the times are with this factor, as a logarithm. They are likely if one slowness explains
        all steps."""
        logs = [log - math.log1p(factor * x) for x, log in self._steps]
        middle = median(logs)
        noise = LEAST_NOISE + sum([abs(own - middle) for own in logs]) / len(logs)
        return len(logs) * math.log(noise) + (math.log(factor) / USUAL_DEVIATION) ** 2 / 2
