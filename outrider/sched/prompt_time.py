"""PromptTime: how many tokens of prompts fit into a step without holding up the requests that decode in it.

Every step yields a token for each request that decodes, so the longest step is the longest gap between two tokens of a
request. A step with prompts and with requests that decode is therefore kept below a number of seconds, by measured
costs. Prompts that nobody waits for are computed in full steps.
"""

from __future__ import annotations

from outrider.core.costs import MixedStepCosts


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

    def __init__(self, max_seconds: float, costs: MixedStepCosts) -> None:
        self._max_seconds, self._costs = max_seconds, costs

    def begin(self, lengths: list[int], num_tokens: int, budget: int) -> TimedStep:
        """A step in which requests of these lengths decode, with num_tokens tokens in all. Where decoding alone takes
        more than half of the bound, prompts still get as much time as decoding."""
        reading = self._costs.read(lengths)
        decoding = self._costs.step(num_tokens) + reading
        return TimedStep(self._costs, max(self._max_seconds, 2 * decoding), num_tokens, budget, reading)
