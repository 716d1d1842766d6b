"""A drafter's confidence in each draft, as small integers that the device reports to the scheduler.

A drafter with a network gives every draft a probability. It is rounded to a *level*: 1 to 15 for fifteenths of the
range from 0 to 1, and 0 if the drafter gives no probability (an n-gram lookup). The levels of a request's drafts are
packed into one integer: four bits for each draft, the first draft's in the lowest bits."""

from __future__ import annotations

from dataclasses import dataclass

LEVEL_BITS = 4
NUM_LEVELS = 1 << LEVEL_BITS
TOP_LEVEL = NUM_LEVELS - 1
MOST_PLACES = 15  # drafts of a request whose levels are kept: those behind have level 0
# Chances as the device computes with them: in whole numbers, so that all ranks and all kernels agree.
CHANCE_BITS, WEIGHT_BITS, GAIN_BITS = 15, 10, 30
MOST_CHANCE = 0.99  # of one draft


def levels_of(packed: int, count: int) -> list[int]:
    """Unpack the confidence levels of a request's first `count` drafts from one integer."""
    return [packed >> LEVEL_BITS * place & TOP_LEVEL for place in range(count)]


@dataclass(frozen=True, slots=True)
class DraftSharing:
    """An order to the device to distribute a fixed number of token rows among the drafts of a step, likeliest drafts
    first. The scheduler cannot distribute them itself, because it runs ahead of the device and does not know the
    drafter's confidence in these drafts yet."""

    total: int  # drafts of all requests together
    weights: list[int]  # of each request: its factor on the chances of its drafts, in units of 2 ** -WEIGHT_BITS
    chances: list[int]  # [place, level] of a draft that was reached, in units of 2 ** -CHANCE_BITS
