"""PromptTime: limits the prompt tokens of a step, so that prompts do not hold up the requests that decode in it.

Every step yields a token for each request that decodes, so a long step is a long gap in every stream. With
`max_step_ms` (12 for `AsyncLLM` and the server, no limit for `LLM` and on a CPU) a step with prompts and with requests
that decode gets as many prompt tokens as fit into that time. Steps without requests that decode are full.
`Scheduler._begin_prompts` calls `PromptTime.begin` for each step, and `TimedStep.most_tokens` for each prompt. A long
prompt of a request for embeddings leaves up to half of a step's tokens to short prompts behind it
(`FullStep.room_for`, `sched/full_step.py`).

- The time is predicted from costs that the worker measures at start-up (`runner/graphs/mixed_costs.py`): captured steps
  by their number of tokens, the reading of contexts, and attention by pairs of tokens and keys. Sizes far beyond the
  limit are not measured but taken in proportion.
- Chunks fill captured sizes. The first prompt of a step always advances.
- If decoding takes more than half of the limit, prompts get as much time as decoding.

`PromptTime.begin` chooses one of three limits. "The bound" is `max_step_ms`:

| case | the step takes at most |
|---|---|
| more prompts are in line than established requests decode: a *burst* | `burst_bounds` times the bound |
| prompts have time (`Patience`) | a *small step*: 1.15 times decoding (`SMALL_STEP`) |
| otherwise | the bound, or twice the time of decoding if that is more |

**Bursts.** If a hundred requests arrive at once, the first of them decode while the others wait. Short steps would
serve those few at the cost of the others. `max_step_ms` therefore holds for *established* requests only: those that had
their first token before the burst came, and every request after 128 steps (`Burst`). A step of a burst may take
`max_step_ms` times a factor, `burst_bounds`. The factor is at least 1, and the smallest of:

- the number of prompts in line, divided by the number of established requests that decode, if any do;
- two thirds of the number of requests that decode, so that prompts begin to decode in growing groups;
- 16, or 5 in a burst of more than 64 requests, which has many long gaps in any case.

If decoding is slow, the step may take longer still: twice the time of decoding, times `burst_bounds` or 5, whichever
is less. A burst ends with the first step without prompts.

**Small steps.** A step reads the weights for the requests that decode in any case, so its first few prompt tokens cost
little. Prompts get small steps under three conditions: small steps compute each prompt within 40 ms and all prompts
within 250 ms, and a small step has room for 4 prompt tokens for each request that decodes. The last condition keeps
prompts that go on arriving from forming a queue.

docs/decisions.md has the rules that were tried.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from math import inf
from typing import NamedTuple

from outrider.core.costs import SMALL_STEP, MixedStepCosts
from outrider.sched.full_step import FullStep, PromptLine, UnboundedPrompts
from outrider.sched.request import Request

SMALL_BURST = 64  # requests, at most
SMALL_BURST_BOUNDS, LARGE_BURST_BOUNDS = 16, 5  # times max_step_ms that a step may take in a burst
BOUNDS_PER_REQUEST = 2 / 3  # times max_step_ms that a step of a burst may take for each request that decodes
ESTABLISHED_STEPS = 128  # steps after which a request counts as established, whatever came before: bursts must end
LEAST_SHARE = 4  # tokens of prompts in a small step for each request that decodes, so that new prompts find no queue


class Patience(NamedTuple):
    """The number of seconds that prompts may take in small steps. Prompts that would take longer are computed as fast
    as the time limit of a step allows."""

    one_prompt: float
    all_prompts: float  # those that have begun and those that wait

    def allows(self, tokens_per_second: float, begun: Iterable[Request], waiting: Iterable[Request]) -> bool:
        """Whether small steps can compute each prompt within the seconds allowed for one, and the rest of all prompts
        within the seconds allowed for all. Stops reading at the first excess, because many requests may wait."""
        prompts = chain(((own.admitted_len, own.admitted_len - own.bound.at_most) for own in begun),
                        ((len(own.token_ids), len(own.token_ids)) for own in waiting))
        most, most_left = tokens_per_second * self.one_prompt, tokens_per_second * self.all_prompts
        for num_tokens, num_left in prompts:
            most_left -= num_left
            if num_tokens > most or most_left < 0:
                return False
        return True


PATIENCE = Patience(one_prompt=0.040, all_prompts=0.250)


class TimedStep(FullStep):
    """The token budget for prompts in a step with a time limit, because other requests decode in it."""

    def __init__(self, costs: MixedStepCosts, max_seconds: float, num_tokens: int, budget: int, seconds: float,
                 line: PromptLine) -> None:
        """num_tokens: tokens scheduled so far. budget: tokens that are left. seconds: time that the scheduled tokens
        take to read their contexts."""
        super().__init__(budget, line)
        self._costs, self._max_seconds = costs, max_seconds
        self._num_tokens, self._seconds = num_tokens, seconds
        self._has_prompt = False

    def most_tokens(self, context: int) -> int:
        """The most tokens that a request's next chunk may have. `context`: how many tokens of the request are computed.
        The number fills a captured size, so that no token row is padding. The first chunk of a step always gets some,
        because prompts must make progress too."""
        seconds_left = self._max_seconds - self._seconds
        for size, seconds in zip(reversed(self._costs.tokens), reversed(self._costs.seconds), strict=True):
            num_tokens = min(size - self._num_tokens, self.tokens_left)
            if num_tokens <= 0:
                break
            if seconds <= seconds_left and seconds + self._costs.attend(num_tokens, context) <= seconds_left:
                return num_tokens
        return 0 if self._has_prompt else min(self._costs.tokens[0], self.tokens_left)

    def add(self, num_tokens: int, context: int) -> None:
        super().add(num_tokens, context)
        self._num_tokens += num_tokens
        self._seconds += self._costs.attend(num_tokens, context)
        self._has_prompt = True


class Burst:
    """A burst of requests. It lasts as long as every step has prompts.

    The first requests of a burst decode while its other requests still wait. Short steps for these first requests would
    delay the others, so only established requests, which decoded before the burst came, are promised short steps."""

    def __init__(self) -> None:
        self._last_step = -2
        self._since = 0  # settled steps when the burst came

    def num_established(self, decoding: list[Request], line: PromptLine, step: int) -> int:
        """The number of requests in `decoding` that had their first token before the burst came, or long ago. Must be
        called in every step with prompts."""
        if step > self._last_step + 1:
            self._since = line.first.arrived_at
        self._last_step = step
        since = max(self._since, step - ESTABLISHED_STEPS)
        return sum(request.prompt_done_at < since for request in decoding)


class PromptTime(UnboundedPrompts):
    """Limits the time of steps that compute prompts while other requests decode."""

    def __init__(self, max_seconds: float, costs: MixedStepCosts, patience: Patience = PATIENCE) -> None:
        self._max_seconds, self._costs, self._patience = max_seconds, costs, patience
        self._burst = Burst()

    def begin(self, decoding: list[Request], num_tokens: int, budget: int, line: PromptLine, step: int) -> TimedStep:
        lengths = [request.bound.at_most for request in decoding]
        reading = self._costs.read(lengths)
        seconds = self._costs.step(num_tokens) + reading
        num_established = self._burst.num_established(decoding, line, step) if line.num_prompts else len(decoding)
        if line.num_prompts > num_established:
            bounds = burst_bounds(line.num_prompts, len(decoding), num_established)
            max_seconds = max(bounds * self._max_seconds, min(bounds, LARGE_BURST_BOUNDS) * 2 * seconds)
        else:
            max_seconds = min(max(self._max_seconds, 2 * seconds), self._small_step(lengths, num_tokens, reading, line))
        return TimedStep(self._costs, max_seconds, num_tokens, budget, reading, line)

    def _small_step(self, lengths: list[int], num_tokens: int, reading: float, line: PromptLine) -> float:
        """Return the seconds that a small step takes; infinite if small steps would make prompts too slow."""
        decoding = self._costs.step(num_tokens) + reading
        size = self._costs.largest_size(SMALL_STEP * decoding - reading)
        room, seconds = size - num_tokens, self._costs.step(size) + reading
        if room < LEAST_SHARE * len(lengths):
            return inf
        if not self._patience.allows(room / seconds, line.begun, line.waiting.ready):
            return inf
        return seconds + self._costs.attend(room, int(room / seconds * self._patience.one_prompt))


def burst_bounds(num_prompts: int, num_decoding: int, num_established: int) -> float:
    """Return the factor on the usual time limit of a step in a burst.

    The more requests decode, the longer the step may be, so that prompts begin to decode in growing groups: then there
    are few steps, and most requests wait for one or two long ones. A large burst has many steps in any case; its steps
    are no longer than is needed to compute prompts at nearly full speed. Established requests make steps shorter."""
    most = SMALL_BURST_BOUNDS if num_prompts + num_decoding <= SMALL_BURST else LARGE_BURST_BOUNDS
    growing = max(1.0, BOUNDS_PER_REQUEST * num_decoding)
    return min(most, growing, num_prompts / num_established if num_established else inf)
