"""Request: the scheduler's state of one generation, from its arrival to its last tokens.

There are three types: CheckedRequest has the caller's prompt and parameters, and never changes; Request has the
progress of one of its samples; RequestStats has counts. Only the device knows exact lengths. A Request has a lower and
an upper bound: `settled` and `bound` (`core/lengths.py`)."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from outrider.core import NULL_ROW, Admission, Bound, Finish, Settled
from outrider.core.checked_request import CheckedRequest
from outrider.core.costs import SamplerLoad


class State(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True)
class RequestStats:
    num_preemptions: int = 0
    num_hit_tokens: int = 0  # prefix-cache tokens of its last admission
    num_steps: int = 0  # steps that yielded a run
    num_drafted: int = 0
    num_accepted: int = 0


class Request:
    """Progress of one generation: its lengths, row, state and epoch."""

    __slots__ = (
        "id", "input", "end_len", "eos_ids", "sample_index", "stats", "token_ids", "prompt_len", "max_drafts",
        "sampler_load", "state", "epoch", "row", "settled", "bound", "admitted_len", "in_flight_samples", "unsettled",
        "covered", "free_bound", "next_event", "num_proposed", "levels", "checked_levels", "folded", "num_pending",
        "arrived_at", "prompt_done_at", "shares_promises", "finish", "error",
    )

    def __init__(self, request_id: int, asked: CheckedRequest, end_len: int, eos_ids: tuple[int, ...] = (),
                 sample_index: int = 0) -> None:
        """end_len: known tokens at which the request ends."""
        self.id = request_id
        self.input = asked
        self.end_len, self.eos_ids, self.sample_index = end_len, eos_ids, sample_index
        self.stats = RequestStats()
        self.token_ids = list(asked.token_ids)  # the prompt and the settled outputs
        self.prompt_len = len(asked.token_ids)
        self.max_drafts = asked.sampling.max_drafts  # the caller's ceiling; None leaves it to the engine
        self.sampler_load = SamplerLoad.from_params(asked.sampling)
        self.state = State.WAITING
        self.epoch = 0  # rises with every preemption: results of an older epoch are dropped
        self.row = NULL_ROW
        self.settled = Settled()
        self.bound = Bound()
        self.admitted_len = 0  # known tokens when it was last admitted
        self.folded = 0  # settled tokens that recurrent states have seen; the last accepted drafts wait
        self.num_pending = 0  # drafts of its last scheduled step, of which some may be accepted and wait
        self.in_flight_samples = 0  # steps in flight that each yield at least one token
        self.unsettled = 0  # tokens scheduled in steps in flight
        self.covered = 0  # tokens its pages have room for
        self.free_bound = 0  # up to this bound a decode step needs no page and cannot end the request; 0: ask
        self.next_event = 0  # settled length at which the cache manager has something to do
        self.arrived_at = 0  # number of steps that had settled when it arrived
        self.prompt_done_at = 0  # number of the step that computes the last token of its prompt
        self.num_proposed = 0  # drafts that wait on the device, as the last result said
        self.levels = 0  # how sure their drafter is of them (`core/draft_confidence.py`)
        self.checked_levels = 0  # the same, of the drafts that the last settled step checked
        self.shares_promises = True  # until it had to start again because a promise was broken
        self.finish = Finish.NO
        self.error: str | None = None

    def take_row(self, row: int, hit: int) -> None:
        """Begin to run in a batch row. `hit`: how many tokens are already computed, because of a prefix hit."""
        self.row, self.state, self.admitted_len = row, State.RUNNING, len(self.token_ids)
        self.settled.at_least = self.bound.at_most = self.covered = self.folded = hit
        self.stats.num_hit_tokens = hit
        self.in_flight_samples = self.unsettled = self.num_proposed = self.num_pending = 0
        self.levels = self.checked_levels = self.free_bound = 0

    def admission(self, checkpoint: list[int]) -> Admission:
        """Return all data about the request that the device needs before its first step in this row. checkpoint: pages
        of the recurrent state that it begins from."""
        return Admission(self.row, self.input, self.settled.at_least, self.end_len, self.eos_ids, self.sample_index,
                         self.token_ids[self.prompt_len :], checkpoint)

    def leave_row(self) -> None:
        """Give up the row. The epoch rises, so results of steps in flight no longer count for the request."""
        self.row, self.epoch, self.settled, self.free_bound = NULL_ROW, self.epoch + 1, Settled(), 0

    @property
    def yields_tokens(self) -> bool:
        """Whether the request decodes: all tokens known at its admission are computed, or will be by the steps in
        flight."""
        return self.state is State.RUNNING and self.admitted_len <= self.bound.at_most

    @property
    def num_left(self) -> int:
        """Tokens until the request ends, if every step in flight yields one."""
        return self.end_len - len(self.token_ids) - self.in_flight_samples
