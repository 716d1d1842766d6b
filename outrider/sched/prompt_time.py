"""PromptTime: how many tokens of prompts fit into a step without holding up the requests that decode in it.

Every step yields a token for each request that decodes, so the longest step is the longest gap between two tokens of a
request. A step with prompts and with requests that decode is therefore kept below a number of seconds, by measured
costs, and takes hardly longer than decoding alone where prompts have time. Prompts that nobody waits for are computed
in full steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

from outrider.core.costs import SMALL_STEP, MixedStepCosts
from outrider.sched.request import Request

LEAST_SHARE = 4  # tokens of prompts in a small step for each request that decodes, so that new prompts find no queue


class Patience(NamedTuple):
    """Seconds that prompts may take in small steps. Prompts that would take longer are computed as fast as the bound of
    a step allows."""

    one_prompt: float
    all_prompts: float  # those that have begun and those that wait

    def allows(self, tokens_per_second: float, begun: Iterable[Request], waiting: Iterable[Request]) -> bool:
        """Whether each of the prompts, and what is left of all of them, takes no longer. Ends early: many may wait."""
        prompts = chain(((own.admitted_len, own.admitted_len - own.bound.at_most) for own in begun),
                        ((len(own.token_ids), len(own.token_ids)) for own in waiting))
        most, most_left = tokens_per_second * self.one_prompt, tokens_per_second * self.all_prompts
        for num_tokens, num_left in prompts:
            most_left -= num_left
            if num_tokens > most or most_left < 0:
                return False
        return True


PATIENCE = Patience(one_prompt=0.040, all_prompts=0.250)


class FullStep:
    """Room for prompts in a step that nobody waits for: all the tokens that are left."""

    def __init__(self, budget: int) -> None:
        self.tokens_left = budget

    def most_tokens(self, context: int) -> int:
        return self.tokens_left

    def add(self, num_tokens: int, context: int) -> None:
        self.tokens_left -= num_tokens


class TimedStep:
    """Room for prompts in a step whose requests wait for their next tokens."""

    def __init__(self, costs: MixedStepCosts, max_seconds: float, num_tokens: int, budget: int, seconds: float) -> None:
        """num_tokens: scheduled so far. budget: tokens that are left. seconds: of the scheduled tokens' attention."""
        self._costs, self._max_seconds = costs, max_seconds
        self._num_tokens, self._seconds = num_tokens, seconds
        self.tokens_left = budget  # a span of a prompt may take them all, since it cannot be cut
        self._has_prompt = False

    def most_tokens(self, context: int) -> int:
        """Tokens that the next chunk may have, behind `context` computed ones. They fill a captured size, so that none
        is padding. The first chunk of a step always has some: prompts must end too."""
        for size in reversed(self._costs.tokens):
            num_tokens = min(size - self._num_tokens, self.tokens_left)
            if num_tokens <= 0:
                break
            if self._costs.step(size) + self._seconds + self._costs.attend(num_tokens, context) <= self._max_seconds:
                return num_tokens
        return 0 if self._has_prompt else min(self._costs.tokens[0], self.tokens_left)

    def add(self, num_tokens: int, context: int) -> None:
        self._num_tokens += num_tokens
        self.tokens_left -= num_tokens
        self._seconds += self._costs.attend(num_tokens, context)
        self._has_prompt = True


class PromptTime:
    """Bounds the time of steps that compute prompts while other requests decode."""

    def __init__(self, max_seconds: float, costs: MixedStepCosts, patience: Patience = PATIENCE) -> None:
        self._max_seconds, self._costs, self._patience = max_seconds, costs, patience

    def begin(self, lengths: list[int], num_tokens: int, budget: int, begun: Iterable[Request],
              waiting: Iterable[Request]) -> TimedStep:
        """A step in which requests of these lengths decode, with num_tokens tokens in all. begun: requests whose
        prompts are computed in part. Where decoding alone takes more than half of the bound, prompts still get as much
        time as decoding."""
        reading = self._costs.read(lengths)
        decoding = self._costs.step(num_tokens) + reading
        max_seconds = max(self._max_seconds, 2 * decoding)
        size = self._costs.largest_size(SMALL_STEP * decoding - reading)
        room, seconds = size - num_tokens, self._costs.step(size) + reading
        if room >= LEAST_SHARE * len(lengths) and self._patience.allows(room / seconds, begun, waiting):
            longest = int(room / seconds * self._patience.one_prompt)
            max_seconds = min(max_seconds, seconds + self._costs.attend(room, longest))
        return TimedStep(self._costs, max_seconds, num_tokens, budget, reading)
