"""Turns: measures two ways to do something in turns, until the ratio of their speeds is known well enough.

Other programs slow down both ways, but not every turn equally. A single measurement of each would therefore measure the
machine more than the two ways. The spread of the ratios over the turns shows how accurate the result is."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

LEAST_TURNS = 3
CLIPPED_TURNS = 5  # from so many turns on the largest and the smallest ratio count as much as the ones next to them
SETTLED = 0.1  # the most that the ratio may be off by, as a share of it
STANDARD_ERRORS = 2.5  # that it may be off by: turns end when their ratios happen to agree
MOST_SECONDS = 20.0  # for all turns, beyond the least number of them
MOST_TURNS = 20


@dataclass
class Turns:
    speeds: list[tuple[float, float]] = field(default_factory=list)  # of each turn: without, with; each above 0

    def add(self, without: float, with_it: float) -> None:
        self.speeds.append((without, with_it))

    def is_over(self, seconds: float) -> bool:
        """Whether no more turns are needed, or the limits of turns and time are reached. seconds: the time of all turns
        so far."""
        count = len(self.speeds)
        return count >= LEAST_TURNS and (self.is_settled or seconds >= MOST_SECONDS or count >= MOST_TURNS)

    @property
    def ratio(self) -> float:
        """Return the speed of the second way divided by that of the first."""
        return math.exp(statistics.mean(self._logarithms))

    @property
    def margin(self) -> float:
        """Return the possible error of the ratio, as a share of it."""
        found = self._logarithms
        share = 1 - 2 / len(found) if len(found) >= CLIPPED_TURNS else 1.0  # of the turns that are not clipped
        return STANDARD_ERRORS * statistics.stdev(found) / (share * math.sqrt(len(found)))

    @property
    def is_settled(self) -> bool:
        return len(self.speeds) >= LEAST_TURNS and self.margin <= SETTLED

    @property
    def _logarithms(self) -> list[float]:
        found = sorted(math.log(with_it / without) for without, with_it in self.speeds)
        if len(found) >= CLIPPED_TURNS:
            found[0], found[-1] = found[1], found[-2]
        return found

    def line(self, with_it: str) -> str:
        """Return the result as a sentence: speeds without drafts and with them. with_it: the name of the drafts in the
        sentence."""
        without, others = zip(*self.speeds, strict=True)
        speed, count = statistics.median(without), len(self.speeds)
        if self.is_settled or abs(math.log(self.ratio)) > self.margin:
            return (f"{speed:.1f} tokens/s without drafts, {speed * self.ratio:.1f} with {with_it}: {self.ratio:.2f}x "
                    f"(± {self.ratio * self.margin:.2f}, {count} turns)")
        return (f"{min(without):.1f} to {max(without):.1f} tokens/s without drafts, {min(others):.1f} to "
                f"{max(others):.1f} with {with_it} in {count} turns: other programs keep this machine too busy to tell "
                "which is faster")
