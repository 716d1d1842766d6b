"""Request: the host's view of one generation, from arrival to its last run.

The truth about its lengths is on the device; here are the settled length and the bound (see core).
"""

from __future__ import annotations

import enum

from outrider.cache.prefix import PageHashes
from outrider.core import NULL_ROW, Bound, Finish, Settled
from outrider.core.params import SamplingParams


class State(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Request:
    __slots__ = (
        "id", "token_ids", "prompt_len", "params", "eos_ids", "end_len", "seed", "sample_index", "priority",
        "cache_keys", "state", "epoch", "row", "settled", "bound", "known", "in_flight_samples", "unsettled", "covered",
        "next_event", "hashes", "finish", "error", "num_preemptions", "num_hit_tokens", "drafts_wanted", "max_drafts",
        "num_steps", "num_drafted", "num_accepted", "num_proposed", "folded", "num_pending",
    )  # fmt: skip

    def __init__(self, request_id: int, prompt_token_ids: list[int], params: SamplingParams, *, end_len: int, seed: int,
                 eos_ids: tuple[int, ...] = (), sample_index: int = 0, priority: int = 0,
                 cache_keys: tuple[str, ...] = ()) -> None:
        self.id = request_id
        self.token_ids = list(prompt_token_ids)  # the prompt and the settled outputs
        self.prompt_len = len(prompt_token_ids)
        self.params = params
        self.eos_ids = eos_ids
        self.end_len = end_len  # known tokens at which the request ends
        self.seed = seed
        self.sample_index = sample_index
        self.priority = priority
        self.cache_keys = cache_keys  # salt and whatever else must be equal for pages to be shared

        self.state = State.WAITING
        self.epoch = 0
        self.row = NULL_ROW
        self.settled = Settled()
        self.bound = Bound()
        self.known = 0  # known tokens when it was last admitted
        self.folded = 0  # of the settled tokens, those that recurrent states have seen: the last drafts accepted wait
        self.num_pending = 0  # drafts of its last scheduled step, of which some may be accepted and wait
        self.in_flight_samples = 0  # steps in flight that each yield at least one token
        self.unsettled = 0  # tokens scheduled in steps in flight
        self.covered = 0  # tokens its pages have room for
        self.next_event = 0  # settled length at which the cache manager has something to do
        self.hashes: dict[int, PageHashes] | None = None
        self.finish = Finish.NO
        self.error: str | None = None
        self.num_preemptions = 0
        self.num_hit_tokens = 0
        self.drafts_wanted = 0  # what the draft-count chooser last said
        self.max_drafts = params.max_drafts  # the caller's ceiling, None for the engine's
        self.num_proposed = 0  # drafts that wait on the device, as the last result said
        self.num_steps = 0  # steps that yielded a run
        self.num_drafted = 0
        self.num_accepted = 0

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.prompt_len :]

    @property
    def num_prefill_left(self) -> int:
        """Known tokens not yet scheduled; zero once it yields tokens."""
        return max(0, self.known - self.bound.at_most)
