"""Which captured step serves a batch, or why none does. Captures nothing itself.

A request's number of drafts is data, not a key: a graph serves any batch that fits its padded requests and tokens, and
its sampler draws where a temperature is not 0. So that few graphs serve all, decode steps come in three kinds for each
number of requests: plain, plain with a proposal, and with d drafts for each request, which proposes d again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from outrider.core import Limits, ScheduledBatch, StepForm, Uncaptured
from outrider.runner.batch import CapturedShape
from outrider.runner.graphs.sizes import FEW, GraphSizes, next_size
from outrider.runner.rows import RowParams
from outrider.runner.step import NoCheckpoints, RowCheckpoints, StepPlan
from outrider.sample.extras import StepExtras, StepNeeds
from outrider.spec.base import Drafter


@dataclass(frozen=True)
class GraphKey:
    requests: int
    tokens: int
    propose: int
    has_drafts: bool  # part of the key, because a few drafts can fit into the padding of the requests
    takes_checkpoints: bool = False  # requests may write a checkpoint each
    has_prompts: bool = False  # requests may have any number of tokens
    form: StepForm = StepForm.WHOLE

    @property
    def plan(self) -> StepPlan:
        """What a captured step does beside its shape: it draws, and reports nothing but tokens."""
        checkpoints = RowCheckpoints() if self.takes_checkpoints else NoCheckpoints()
        return StepPlan(StepNeeds(any_sampled=True), StepExtras(), True, self.propose, checkpoints)


class GraphKeys:
    def __init__(self, limits: Limits, drafter: Drafter | None, *, takes_prompts: bool = True) -> None:
        """takes_prompts: whether the step can do without the host's counts of tokens."""
        self.limits = limits
        self.sizes = GraphSizes.from_limits(limits)
        self._drafter = drafter
        self._takes_prompts = takes_prompts
        # A drafter with layers costs time by its drafts; any other always proposes all it can.
        self._is_costly = drafter is not None and bool(drafter.attention_layers)

    def key_for(self, batch: ScheduledBatch, params: RowParams) -> GraphKey | Uncaptured:
        """The graph that serves a batch, or the reason why none does."""
        rows = {write.row for write in batch.checkpoints}
        if batch.folds:
            return Uncaptured.FOLDS
        if len(rows) < len(batch.checkpoints):
            return Uncaptured.SEVERAL_CHECKPOINTS
        if batch.num_requests > self.limits.max_requests:
            return Uncaptured.TOO_MANY_REQUESTS
        if not params.are_plain(batch.rows):
            return Uncaptured.SAMPLING_PARAMETERS
        if self._drafter is not None and self._drafter.has_slots_to_fill:
            return Uncaptured.DRAFTER_FILLS_SLOTS
        if not all(batch.samples) or max(batch.num_known) > 1:
            return self._with_prompts(batch, bool(rows))
        requests, drafts = next_size(self.sizes.requests, batch.num_requests), max(batch.num_drafts)
        propose = batch.propose
        if not self._is_costly:
            propose = self.limits.max_drafts if propose or drafts else 0
        elif drafts or requests <= FEW:  # tokens of few requests cost nothing: one graph less
            drafts = propose = max(drafts, propose)
        return GraphKey(requests, requests * (1 + drafts), propose, drafts > 0, bool(rows), form=batch.form)

    def _with_prompts(self, batch: ScheduledBatch, takes_checkpoints: bool) -> GraphKey | Uncaptured:
        if not self._takes_prompts:
            return Uncaptured.PROMPTS
        if batch.num_tokens > self.limits.max_batched_tokens:
            return Uncaptured.TOO_MANY_TOKENS
        return GraphKey(
            next_size(self.sizes.prompt_requests, batch.num_requests),
            next_size(self.sizes.prompt_tokens, batch.num_tokens), self.limits.max_drafts if batch.propose else 0,
            any(batch.num_drafts), takes_checkpoints, has_prompts=True, form=batch.form,
        )  # fmt: skip

    def wider(self, key: GraphKey) -> GraphKey:
        """One that serves whatever `key` serves, and is captured at start-up if there is such; else `key` itself."""
        if key.has_prompts:
            return key
        requests, drafts = next_size(self.sizes.at_start, key.requests), key.tokens // key.requests - 1
        propose = key.propose
        if key.has_drafts and (requests > FEW or key.requests == requests):
            drafts = propose = self.limits.max_drafts
        return replace(key, requests=requests, tokens=requests * (1 + drafts), propose=propose)

    def decoding(self, *, takes_checkpoints: bool) -> Iterator[GraphKey]:
        """What a server meets, largest first so that their memory is shared."""
        max_drafts = self.limits.max_drafts
        for requests in reversed(self.sizes.at_start):
            for own in (False, True) if takes_checkpoints else (False,):
                yield GraphKey(requests, requests, 0, False, own)
                if max_drafts and not self._is_costly:
                    yield GraphKey(requests, requests, max_drafts, False, own)
                for drafts in range(1 if requests <= FEW else max_drafts, max_drafts + 1) if max_drafts else ():
                    propose = drafts if self._is_costly else max_drafts
                    yield GraphKey(requests, requests * (1 + drafts), propose, True, own)

    def prompts(self) -> Iterator[GraphKey]:
        """Some of each kind of steps with prompts: there are too many sizes for all of them."""
        if not self._takes_prompts:
            return
        max_drafts, sizes = self.limits.max_drafts, self.sizes
        for requests in {sizes.prompt_requests[0], sizes.prompt_requests[-1]}:
            for propose in {0, max_drafts}:
                for has_drafts in {False, max_drafts > 0}:
                    yield GraphKey(requests, sizes.prompt_tokens[0], propose, has_drafts, has_prompts=True)

    def at_start(self, *, takes_checkpoints: bool) -> Iterator[GraphKey]:
        """What is captured at start-up, in order. The largest step with prompts is the first: its memory serves all."""
        max_drafts, sizes = self.limits.max_drafts, self.sizes
        if self._takes_prompts:
            largest = (sizes.prompt_requests[-1], sizes.prompt_tokens[-1])
            yield GraphKey(*largest, max_drafts, max_drafts > 0, has_prompts=True)
        yield from self.decoding(takes_checkpoints=takes_checkpoints)

    def shape(self, key: GraphKey) -> CapturedShape:
        make = CapturedShape.with_prompts if key.has_prompts else CapturedShape.decoding
        return make(key.requests, key.tokens, self.limits.max_drafts if key.has_drafts else 0,
                    window=self.limits.max_drafts, max_len=self.limits.max_len,
                    takes_checkpoints=key.takes_checkpoints)
