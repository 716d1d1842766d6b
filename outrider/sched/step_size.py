"""StepSize: the largest step that may be scheduled. It is set by the limits, and is smaller for a while after the
device ran out of memory for a step. No torch.

Start-up plans memory for the largest step, but later other processes may take some of the device's memory. A step that
found too little is scheduled again in half: half the requests, half the tokens. After some steps that pass, the size
doubles; if that fails again, more steps must pass before the next try."""

from __future__ import annotations

from outrider.core import Limits

LEAST_TOKENS = 16  # of a step of one request: a smaller one takes hardly less memory
FIRST_WAIT, MOST_WAIT = 64, 4096  # steps that pass before the size doubles


class StepSize:
    def __init__(self, limits: Limits) -> None:
        self._most_requests, self._most_tokens = limits.max_requests, limits.max_batched_tokens
        self.requests, self.tokens = self._most_requests, self._most_tokens
        self._wait, self._num_passed = FIRST_WAIT // 2, 0

    @property
    def is_whole(self) -> bool:
        return (self.requests, self.tokens) == (self._most_requests, self._most_tokens)

    def shrink(self, num_requests: int, num_tokens: int) -> bool:
        """Halve the largest step, because there was no memory for a step of this size. Returns False if the size cannot
        be halved."""
        if num_requests <= 1 and num_tokens <= LEAST_TOKENS:
            return False
        self.requests = max(1, min(self.requests, num_requests // 2))
        self.tokens = max(self.requests, min(self._most_tokens, LEAST_TOKENS), min(self.tokens, num_tokens // 2))
        self._wait, self._num_passed = min(MOST_WAIT, 2 * self._wait), 0
        return True

    def pass_step(self) -> None:
        """Note that a step has passed. After enough of them, larger steps are tried."""
        if not self.is_whole:
            self._num_passed += 1
            if self._num_passed >= self._wait:
                self.grow()

    def grow(self) -> None:
        self._num_passed = 0
        self.requests = min(self._most_requests, 2 * self.requests)
        self.tokens = min(self._most_tokens, 2 * self.tokens)
