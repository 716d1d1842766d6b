"""The token budget that a step has for prompts if there is no time limit.

UnboundedPrompts makes a FullStep for each step. The FullStep tells how many tokens the next chunk of a prompt may have.
PromptLine is the queue of prompts.
"""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

from outrider.sched.request import Request
from outrider.sched.waiting import WaitingRequests


class PromptLine(NamedTuple):
    """The queue of prompts: those that are computed in part, and those of waiting requests."""

    begun: list[Request]  # computed in part
    waiting: WaitingRequests
    num_startable: int  # waiting requests that a row is free for

    @property
    def num_prompts(self) -> int:
        return len(self.begun) + self.num_startable

    @property
    def first(self) -> Request:
        return self.begun[0] if self.begun else self.waiting.first_arrived

    def short_tokens(self, behind: Request, most: int) -> int:
        """Return how many tokens the short prompts behind a request still have to compute, capped at `most`. A prompt
        is short if at most `most` of its tokens are left. Prompts of the same tenant that are less urgent than the
        request do not count."""
        begun = self.begun[self.begun.index(behind) + 1 :] if behind in self.begun else []
        total = 0
        for other in chain(begun, self.waiting.ready if self.num_startable else ()):
            num_left = len(other.token_ids) - other.bound.at_most
            if other is not behind and num_left <= most and not _is_less_urgent(other, behind):
                total += num_left
                if total >= most:
                    return most
        return total


def _is_less_urgent(request: Request, other: Request) -> bool:
    one, two = request.input, other.input
    return one.tenant == two.tenant and one.priority > two.priority


class FullStep:
    """The token budget for prompts in a step without a time limit: all tokens that decoding requests leave."""

    def __init__(self, budget: int, line: PromptLine) -> None:
        self.tokens_left = budget  # a range of a prompt that cannot be cut may take them all
        self._line = line
        self._max_short = self._num_kept = -1  # tokens of a short prompt, and kept for those behind; -1: not known yet

    def most_tokens(self, context: int) -> int:
        """Return the most tokens that a request's next chunk may have. `context`: how many tokens of the request are
        computed."""
        return self.tokens_left

    def room_for(self, request: Request) -> int:
        """Tokens that the request's next chunk may have. A long prompt of a request that yields no tokens, such as an
        embedding, leaves up to half of the step to short prompts in the queue, so that they do not wait for the end of
        the long prompt."""
        most = self.most_tokens(request.bound.at_most)
        if request.input.generates:
            return most
        if self._max_short < 0:
            self._max_short = most // 2
        if len(request.token_ids) - request.bound.at_most <= self._max_short:
            return most
        if self._num_kept < 0:
            self._num_kept = self._line.short_tokens(request, self._max_short)
        return max(0, most - self._num_kept)

    def add(self, num_tokens: int, context: int) -> None:
        self.tokens_left -= num_tokens


class UnboundedPrompts:
    """Lets prompts fill a step completely, even if requests that decode then wait long for their next token."""

    def begin(self, decoding: list[Request], num_tokens: int, budget: int, line: PromptLine, step: int) -> FullStep:
        """Return the token budget for prompts in step number `step`. The requests in `decoding` already have
        `num_tokens` tokens in this step. budget: tokens that are left."""
        return FullStep(budget, line)


UNBOUNDED_PROMPTS = UnboundedPrompts()
