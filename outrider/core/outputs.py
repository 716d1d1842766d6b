"""What a caller gets back. Names follow vLLM's where they mean the same. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Logprob:
    logprob: float
    rank: int | None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One of the n samples of a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # stop, length, abort or error
    stop_reason: int | str | None = None  # the token id or string that stopped it
    logprobs: list[dict[int, Logprob]] | None = None
    error: str | None = None

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestMetrics:
    """Times in seconds on one clock; counts over all samples of the request."""

    arrival_time: float = 0.0
    first_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_steps: int = 0  # steps that yielded tokens
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)  # drafts accepted at place 0, 1, ...

    @property
    def mean_run_length(self) -> float:
        return 1 + self.num_accepted_tokens / self.num_steps if self.num_steps else 0.0

    def observe_drafts(self, num_accepted: int) -> None:
        """One step's accepted drafts: they are the first ones of the draft."""
        self.accepted_per_position += [0] * (num_accepted - len(self.accepted_per_position))
        for position in range(num_accepted):
            self.accepted_per_position[position] += 1


@dataclass
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    seed: int | None = None  # given with the request or drawn for it: with it a request gives the same text again
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    @property
    def finished(self) -> bool:
        for output in self.outputs:  # not all(..): asked for every request in every step
            if output.finish_reason is None:
                return False
        return True
