"""GraphKeys: finds the key of the captured step that serves a batch, or the reason why none can. It captures nothing
itself.

The number of drafts and the sampling parameters of a request are data in a graph and no part of its key. A graph serves
every batch with at most as many requests and tokens that needs no sampler stage beyond the graph's. Few graphs suffice,
because decode steps have four kinds for each number of requests: no drafts; no drafts, but a proposal; d drafts for
each request and a proposal of d; and a number of token rows that requests with different numbers of drafts share
(`core/decode_sizes.py`).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, product
from typing import Any

from outrider.core import Limits, ScheduledBatch, StepForm, Uncaptured
from outrider.core.decode_sizes import FEW, size_for
from outrider.core.step_messages import DeltaReach
from outrider.drafters.guard import DrafterGuards
from outrider.layers import NO_DELTAS, DeltaSource
from outrider.mixers.mixer import EVERY_LENGTH
from outrider.runner.batch import CapturedShape
from outrider.runner.graphs.sizes import PROMPTS_AT_START, SHARED_DRAFTS, GraphSizes, next_size
from outrider.runner.plan import IDS_ALONE, NoCheckpoints, RowAdditions, RowCheckpoints, StepPlan
from outrider.runner.row_state import RowState
from outrider.sample.extras import StepExtras, StepNeeds
from outrider.sample.logprobs import KERNEL_MAX_LOGPROBS


class SamplerForm(enum.Enum):
    """The sampler of a captured step: a draw only, or all stages. A step with all stages also serves batches that need
    fewer: the row state says which stages a row needs, so the row's token is the same with either sampler."""

    DRAW = "a temperature"
    FULL = "all parameters"


@dataclass(frozen=True)
class GraphKey:
    requests: int
    tokens: int
    num_wanted: int  # drafts that the step proposes for a request
    has_drafts: bool  # part of the key, because a few drafts can fit into the padding of the requests
    takes_checkpoints: bool = False  # requests may write a checkpoint each
    has_prompts: bool = False  # requests may have any number of tokens
    form: StepForm = StepForm.WHOLE
    sampler: SamplerForm = SamplerForm.DRAW
    longest: int = EVERY_LENGTH  # tokens of the longest context that it serves
    deltas: DeltaReach = DeltaReach.NOTHING  # what row deltas may change; no other steps are padded to the graph
    shares_pages: bool = False  # attention reads pages that several requests hold once for several of them

    def covers(self, other: GraphKey) -> bool:
        """Whether a graph of this key can run every batch that a graph of the other key can run."""
        own, others = ((key.has_prompts, key.form, key.sampler, key.shares_pages, key.deltas)
                       for key in (self, other))
        return (own == others and self.requests >= other.requests and self.num_wanted >= other.num_wanted
                and self.tokens >= other.tokens and self.has_drafts >= other.has_drafts
                and self.takes_checkpoints >= other.takes_checkpoints and self.longest >= other.longest)


class GraphKeys:
    def __init__(self, limits: Limits, drafting: DrafterGuards, *, takes_prompts: bool = True,
                 takes_parameters: bool = False, takes_shared: bool = False, takes_checkpoints: bool = False,
                 whole_len: int = EVERY_LENGTH, is_sharing_ready: Callable[[], bool] = lambda: True,
                 deltas: DeltaSource = NO_DELTAS, captures_deltas: bool = True) -> None:
        """takes_prompts: whether the step can do without the host's counts of tokens. takes_parameters: whether kernels
        sample, which read all parameters from the rows. takes_shared: whether attention can read a page once for
        several requests; is_sharing_ready: whether the kernels for that are compiled. takes_checkpoints: whether
        requests write states of recurrent layers to pages. captures_deltas: whether steps with row deltas (low-rank
        changes of the weights) are captured, where the source of the deltas allows it. whole_len: the longest context
        with which steps do less work; decode steps up to this length have graphs of their own."""
        self.limits = limits
        # Drafting goes on behind the longest context of a step.
        short = whole_len - limits.max_drafts
        self._short = short if 0 < short < limits.max_len else EVERY_LENGTH
        self.sizes = GraphSizes.from_limits(limits)
        self._takes_prompts = takes_prompts
        self._takes_parameters = takes_parameters
        self._takes_shared = takes_shared
        self._is_sharing_ready = is_sharing_ready
        self._deltas, self._captures_deltas = deltas, captures_deltas
        self.takes_checkpoints = takes_checkpoints
        self._max_logprobs = min(limits.max_logprobs, KERNEL_MAX_LOGPROBS)
        # A drafter with layers costs time by its drafts; any other always proposes all it can.
        self._is_costly = drafting.has_layers

    def key_for(self, batch: ScheduledBatch, state: RowState) -> GraphKey | Uncaptured:
        """Return the key of the graph that serves the batch, or the reason why no graph can. Called after the batch's
        admissions."""
        rows = {write.row for write in batch.cache.checkpoints}
        if batch.cache.folds:
            return Uncaptured.FOLDS
        if not batch.num_requests:
            return Uncaptured.NO_REQUESTS
        if (reason := state.params.inputs.why_uncaptured(batch)) is not None:
            return reason
        deltas = DeltaReach.NOTHING
        if self._deltas.serves(batch.rows) and not (deltas := self._reach_of_deltas()):
            return Uncaptured.DELTAS
        if len(rows) < len(batch.cache.checkpoints):
            return Uncaptured.SEVERAL_CHECKPOINTS
        if batch.num_requests > self.limits.max_requests:
            return Uncaptured.TOO_MANY_REQUESTS
        sampler = self._sampler_for(batch, state)
        if isinstance(sampler, Uncaptured):
            return sampler
        if not all(batch.samples) or max(batch.num_known) > 1:
            return self._with_prompts(batch, bool(rows), sampler, deltas)
        drafts = max(batch.num_drafts)
        shares = (self._takes_shared and batch.cache.shares_pages and batch.num_requests > FEW
                  and drafts <= SHARED_DRAFTS)
        shares = shares and not deltas and self._is_sharing_ready()
        sizes = self.sizes.shared if shares else self.sizes.requests
        requests = next_size(sizes, batch.num_requests)
        num_wanted = batch.drafting.num_wanted
        num_tokens = batch.num_token_rows
        is_unequal = requests > FEW and not shares and num_tokens < batch.num_requests * (1 + drafts)
        if not self._is_costly:
            num_wanted = self.limits.max_drafts if num_wanted or drafts else 0
        elif drafts or requests <= FEW:  # tokens of few requests cost nothing: one graph less
            num_wanted = max(drafts, num_wanted)
            drafts = drafts if is_unequal else num_wanted
        tokens = size_for(requests, num_tokens, drafts) if is_unequal else requests * (1 + drafts)
        return GraphKey(requests, tokens, num_wanted, drafts > 0, bool(rows), form=batch.mode.form, sampler=sampler,
                        shares_pages=shares, deltas=deltas,
                        longest=self._short if max(batch.bounds) <= self._short else EVERY_LENGTH)

    def _reach_of_deltas(self) -> DeltaReach:
        return self._deltas.captured_reach if self._captures_deltas else DeltaReach.NOTHING

    def _sampler_for(self, batch: ScheduledBatch, state: RowState) -> SamplerForm | Uncaptured:
        if state.params.are_plain(batch.rows):
            return SamplerForm.DRAW
        if state.params.hidden_of(batch.rows):
            return Uncaptured.HIDDEN_STATES
        if not self._takes_parameters:
            return Uncaptured.SAMPLING_PARAMETERS
        if state.params.report_prompts(batch):
            return Uncaptured.PROMPT_LOGPROBS
        if not state.sampling.lists.are_placed(batch.rows):
            return Uncaptured.UNPLACED_LISTS
        if not all(0 <= num <= self._max_logprobs for num in state.params.logprobs_of(batch.rows)):
            return Uncaptured.MANY_LOGPROBS
        return SamplerForm.FULL

    def _with_prompts(self, batch: ScheduledBatch, takes_checkpoints: bool,
                      sampler: SamplerForm, deltas: DeltaReach) -> GraphKey | Uncaptured:
        if not self._takes_prompts:
            return Uncaptured.PROMPTS
        if batch.num_tokens > self.limits.max_batched_tokens:
            return Uncaptured.TOO_MANY_TOKENS
        return GraphKey(
            next_size(self.sizes.prompt_requests, batch.num_requests),
            next_size(self.sizes.prompt_tokens, batch.num_tokens),
            self.limits.max_drafts if batch.drafting.num_wanted else 0,
            any(batch.num_drafts), takes_checkpoints, has_prompts=True, form=batch.mode.form, sampler=sampler,
            deltas=deltas,
        )

    @staticmethod
    def wider(key: GraphKey, captured: Iterable[GraphKey],
              loss: Callable[[GraphKey], float] = lambda wide: 0.0) -> GraphKey | None:
        """Return the cheapest captured key that covers `key`. loss: returns the seconds that a step of `key` is
        expected to lose on a wider graph."""
        covering = [wide for wide in captured if wide.covers(key)]
        return min(covering, key=lambda wide: (loss(wide), wide.tokens, wide.num_wanted, wide.requests,
                                               wide.takes_checkpoints, wide.longest), default=None)

    def plan(self, key: GraphKey) -> StepPlan:
        """Return the host's decisions (`StepPlan`) for the captured step with this key; `shape` returns its sizes."""
        checkpoints = RowCheckpoints() if key.takes_checkpoints else NoCheckpoints()
        needs = StepNeeds(any_sampled=True)
        if key.sampler is not SamplerForm.DRAW:
            needs = StepNeeds.everything(self._max_logprobs)
        additions = RowAdditions(deltas=key.deltas) if key.deltas else IDS_ALONE
        return StepPlan(needs, StepExtras(), True, key.num_wanted, checkpoints, additions=additions)

    def decoding(self) -> Iterator[GraphKey]:
        """Return the keys of the decode steps that are captured at start-up, largest first so that smaller ones use the
        memory of larger ones. If steps with short contexts do less work, the keys are for short contexts; steps with
        longer contexts are captured while the engine is idle, or when a batch needs them."""
        most = self.limits.max_drafts
        for requests in reversed(self.sizes.at_start):
            for own in (False, True) if self.takes_checkpoints else (False,):
                if most and not self._is_costly:
                    yield self.shortened(GraphKey(requests, requests, 0, False, own))
                checked = range(1 if requests <= FEW else max(1, most), most + 1)
                yield from self._of_sizes([requests], [0, *checked], takes_checkpoints=own, longest=self._short)

    def fewer_drafts(self) -> Iterator[GraphKey]:
        """Return the keys of decode steps with many requests and fewer drafts than the maximum. For one draft per
        request, the graph with the most drafts would compute far more token rows and make a longer proposal."""
        sizes = [requests for requests in reversed(self.sizes.at_start) if requests > FEW and self._is_costly]
        yield from self._of_sizes(sizes, range(1, self.limits.max_drafts), takes_checkpoints=self.takes_checkpoints,
                                  longest=self._short)

    def _of_sizes(self, sizes: Iterable[int], num_drafts: Collection[int], **kind: Any) -> Iterator[GraphKey]:
        """Return the keys of decode steps with these numbers of requests. Each request has `num_drafts` drafts to
        check, and the step proposes the same number. If proposals are cheap, the step always proposes the most."""
        for requests, drafts in product(sizes, num_drafts):
            num_wanted = drafts if self._is_costly else self.limits.max_drafts
            yield GraphKey(requests, requests * (1 + drafts), num_wanted, drafts > 0, **kind)

    def shortened(self, key: GraphKey) -> GraphKey:
        """Return the key of this step for short contexts, if steps with short contexts do less work; otherwise the key
        itself."""
        return replace(key, longest=self._short)

    def behind_long_contexts(self) -> Iterator[GraphKey]:
        """Return the keys of a few decode steps with long contexts, with and without drafts. Start-up runs them to
        compile their kernels, because the steps that it captures are for short contexts and launch fewer kernels."""
        sizes = self.sizes.at_start
        for requests in {sizes[0], sizes[len(sizes) // 2], sizes[-1]} if self._short < EVERY_LENGTH else ():
            for drafts in {0, self.limits.max_drafts}:
                yield GraphKey(requests, requests * (1 + drafts), drafts, drafts > 0)

    def beyond_start(self) -> Iterator[GraphKey]:
        """Return the keys of the largest decode steps, if start-up does not capture them. Start-up runs them to compile
        their kernels."""
        requests, most = self.limits.max_requests, self.limits.max_drafts
        if requests > self.sizes.at_start[-1]:
            yield from self._of_sizes([requests], range(most + 1), longest=self._short)
            if self._takes_parameters:
                yield from self._of_sizes([requests], {0, most}, sampler=SamplerForm.FULL)

    def sharing(self) -> Iterator[GraphKey]:
        """Return the keys of decode steps whose attention reads a page once for all requests that share it. They are
        captured when a batch needs them."""
        for requests in self.sizes.shared if self._takes_shared else ():
            for drafts in range(min(SHARED_DRAFTS, self.limits.max_drafts) + 1):
                num_wanted = drafts if self._is_costly else self.limits.max_drafts
                yield GraphKey(requests, requests * (1 + drafts), num_wanted, drafts > 0, shares_pages=True)

    def prompts_by_size(self) -> Iterator[GraphKey]:
        """Return the keys of steps with prompts, one for every captured number of tokens, largest first. Start-up runs
        them, because libraries choose their kernels by that number."""
        largest = self.largest_with_prompts()
        if largest is not None:
            for tokens in reversed(self.sizes.prompt_tokens):
                yield replace(largest, tokens=tokens)

    def with_parameters(self) -> Iterator[GraphKey]:
        """Return the keys of the decode steps with all sampling parameters that start-up captures. Each also serves
        smaller sizes, until a batch gets a graph of its own size."""
        if self._takes_parameters:
            yield from self._of_sizes(reversed(self.sizes.full_at_start), dict.fromkeys((self.limits.max_drafts, 0)),
                                      takes_checkpoints=self.takes_checkpoints, sampler=SamplerForm.FULL)

    def with_deltas(self) -> Iterator[GraphKey]:
        """Keys of the steps with row deltas (low-rank changes of the weights) that are run at start-up, so that their
        kernels are compiled: a few of each kind of step. Such steps are captured when a batch needs them."""
        sizes = self.sizes.at_start
        if reach := self._reach_of_deltas():
            for key in self._of_sizes({sizes[0], sizes[-1]}, {0, self.limits.max_drafts}, longest=self._short):
                yield replace(key, deltas=reach)
            largest = self.largest_with_prompts()
            if largest is not None:
                yield replace(largest, deltas=reach)

    def prompts(self) -> Iterator[GraphKey]:
        """Return the keys of a few steps with prompts of each kind. Start-up runs them to compile their kernels; there
        are too many sizes to run all."""
        most, sizes = self.limits.max_drafts, self.sizes.prompt_requests
        for requests, num_wanted, has_drafts in product({sizes[0], sizes[-1]}, {0, most}, {False, most > 0}):
            if self._takes_prompts:
                yield GraphKey(requests, self.sizes.prompt_tokens[0], num_wanted, has_drafts, has_prompts=True)

    def largest_with_prompts(self) -> GraphKey | None:
        """Return the key of the largest step with prompts; None if no step with prompts can be captured."""
        if not self._takes_prompts:
            return None
        max_drafts, sizes = self.limits.max_drafts, self.sizes
        return GraphKey(sizes.prompt_requests[-1], sizes.prompt_tokens[-1], max_drafts, max_drafts > 0,
                        has_prompts=True)

    def usual(self) -> Iterator[GraphKey]:
        """Keys of the decode steps to capture while the engine is idle, the least important first. First come sizes
        that requests with different numbers of drafts share, then sizes that run on wider graphs until then. Last come
        the sizes of start-up for long contexts, which no graph serves yet."""
        most = self.limits.max_drafts
        for requests, drafts in self.sizes.unequal_when_idle(most):
            yield self.shortened(GraphKey(requests, requests * (1 + drafts), most, True, self.takes_checkpoints))
        lengths, num_drafts = {False, self._short < EVERY_LENGTH}, {0, self.limits.max_drafts}
        for is_long, requests, drafts in product(lengths, reversed(self.sizes.requests), num_drafts):
            if (requests in self.sizes.at_start) == is_long:
                key = GraphKey(requests, requests * (1 + drafts), drafts, drafts > 0, self.takes_checkpoints)
                yield key if is_long else self.shortened(key)

    def likely(self) -> Iterator[GraphKey]:
        """Keys of the decode steps with short contexts, and any number of drafts, that start-up does not capture. They
        are captured when a batch needs them."""
        at_start = set(self.decoding())
        for key in self._of_sizes(self.sizes.requests, range(self.limits.max_drafts, -1, -1),
                                  takes_checkpoints=self.takes_checkpoints, longest=self._short):
            if key not in at_start:
                yield key

    def at_start(self) -> Iterator[GraphKey]:
        """Return the keys captured at start-up. Those with prompts come last: their kernels take longest to compile."""
        return chain(self.decoding_at_start(), self.prompts_at_start())

    def decoding_at_start(self) -> Iterator[GraphKey]:
        return chain(self.decoding(), self.with_parameters())

    def prompts_at_start(self) -> Iterator[GraphKey]:
        """Keys of the steps with prompts that start-up captures: the largest, then a few smaller ones, largest first.
        They serve all other sizes with padding."""
        largest = self.largest_with_prompts()
        if largest is None:
            return
        yield largest
        samplers = list(SamplerForm) if self._takes_parameters else [SamplerForm.DRAW]
        if self._takes_parameters:
            yield replace(largest, takes_checkpoints=self.takes_checkpoints, sampler=SamplerForm.FULL)
        for requests, tokens in reversed(PROMPTS_AT_START):
            for sampler in samplers if tokens < largest.tokens else ():
                yield replace(largest, requests=min(requests, largest.requests), tokens=tokens,
                              takes_checkpoints=self.takes_checkpoints, sampler=sampler)

    def largest(self) -> GraphKey:
        """Return the key with the most tokens among the keys that start-up captures."""
        return self.largest_with_prompts() or next(chain(self.with_parameters(), self.decoding()))

    def shape(self, key: GraphKey) -> CapturedShape:
        make = CapturedShape.with_prompts if key.has_prompts else partial(CapturedShape.decoding,
                                                                          shares_pages=key.shares_pages)
        return make(key.requests, key.tokens, self.limits.max_drafts if key.has_drafts else 0,
                    window=self.limits.max_drafts, max_len=min(key.longest, self.limits.max_len),
                    takes_checkpoints=key.takes_checkpoints)
