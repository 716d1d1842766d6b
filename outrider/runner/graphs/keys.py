"""Which captured step serves a batch: padded sizes, and what else makes two captures differ. Captures nothing itself.

A request's number of drafts is data, not a key: a graph serves any batch that fits its padded requests and tokens, and
its sampler draws where a temperature is not 0. So that few graphs serve all, decode steps come in three kinds for each
number of requests: plain, plain with a proposal, and with d drafts for each request, which proposes d again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from outrider.core import Limits, ScheduledBatch
from outrider.mixers.batch import LengthBound
from outrider.runner.batch import BatchShape, PaddedSize
from outrider.runner.rows import RowParams
from outrider.runner.step import StepPlan
from outrider.sample.extras import StepExtras, StepNeeds
from outrider.spec.base import Drafter

FEW = 8  # requests up to which steps with any number of drafts are captured at start-up


@dataclass(frozen=True)
class GraphKey:
    requests: int
    tokens: int
    propose: int
    has_drafts: bool  # not said by the counts: a few drafts may fit into the padding of the requests
    has_targets: bool = False  # requests may write a checkpoint each
    has_prompts: bool = False  # requests may have any number of tokens


def request_ladder(max_requests: int) -> list[int]:
    sizes = [1, 2, 4, 8, *range(16, 129, 8), *range(144, max_requests + 1, 16)]
    return sorted({size for size in sizes if size < max_requests} | {max_requests})


def start_ladder(max_requests: int) -> list[int]:
    """Of the request ladder what is captured at start-up: the others wait until they are met often."""
    return sorted({*(1 << i for i in range(max_requests.bit_length()) if 1 << i < max_requests), max_requests})


def prompt_ladders(limits: Limits) -> tuple[list[int], list[int]]:
    """(requests, tokens) of steps with prompts. Tokens cost time, so what is padded there is an eighth at most; few
    tokens cost what the weights cost."""
    requests = sorted({*(4**i for i in range(10) if 4**i < limits.max_requests), limits.max_requests})
    most = limits.max_batched_tokens
    tokens = {*range(64, 513, 64), *range(640, 1025, 128), *range(1280, 2049, 256), *range(2560, 4097, 512),
              *range(5120, most + 1, 1024), most}  # fmt: skip
    return requests, sorted(n for n in tokens if n <= most)


class GraphKeys:
    def __init__(self, limits: Limits, drafter: Drafter | None, *, takes_prompts: bool = True) -> None:
        """takes_prompts: whether the step can do without the host's counts of tokens."""
        self.limits = limits
        self._drafter = drafter
        self._takes_prompts = takes_prompts
        # A drafter with layers costs time by its drafts; any other always proposes all it can.
        self._is_costly = drafter is not None and bool(drafter.attention_layers)
        self._ladder = request_ladder(limits.max_requests)
        self._at_start = start_ladder(limits.max_requests)
        self._prompt_requests, self._prompt_tokens = prompt_ladders(limits)

    def key_for(self, batch: ScheduledBatch, params: RowParams) -> GraphKey | None:
        """The graph that serves a batch; None if it asks the sampler for more than a draw, folds rows that ended, may
        write several checkpoints of one request, or fills a drafter's slots of a hit."""
        targets = [write.row for write in batch.checkpoints]
        if batch.folds or len(set(targets)) < len(targets):
            return None
        if batch.num_requests > self._ladder[-1] or not params.are_plain(batch.rows):
            return None
        if self._drafter is not None and not self._drafter.is_settled:
            return None
        if not all(batch.samples) or max(batch.num_known) > 1:
            return self._with_prompts(batch, bool(targets))
        requests, drafts, propose = _next(self._ladder, batch.num_requests), max(batch.num_drafts), batch.propose
        if not self._is_costly:
            propose = self.limits.max_drafts if propose or drafts else 0
        elif drafts or requests <= FEW:  # tokens of few requests cost nothing: one graph less
            drafts = propose = max(drafts, propose)
        return GraphKey(requests, requests * (1 + drafts), propose, drafts > 0, bool(targets))

    def _with_prompts(self, batch: ScheduledBatch, has_targets: bool) -> GraphKey | None:
        if not self._takes_prompts or batch.num_tokens > self._prompt_tokens[-1]:
            return None
        return GraphKey(
            _next(self._prompt_requests, batch.num_requests), _next(self._prompt_tokens, batch.num_tokens),
            self.limits.max_drafts if batch.propose else 0, any(batch.num_drafts), has_targets, has_prompts=True,
        )  # fmt: skip

    def wider(self, key: GraphKey) -> GraphKey | None:
        """One that serves whatever `key` serves, and is captured at start-up if there is such."""
        if key.has_prompts:
            return None
        requests, drafts, propose = _next(self._at_start, key.requests), key.tokens // key.requests - 1, key.propose
        if key.has_drafts and (requests > FEW or key.requests == requests):
            drafts = propose = self.limits.max_drafts
        return GraphKey(requests, requests * (1 + drafts), propose, key.has_drafts, key.has_targets)

    def decoding(self, *, takes_checkpoints: bool) -> Iterator[GraphKey]:
        """What a server meets, largest first so that their memory is shared."""
        most = self.limits.max_drafts
        for requests in reversed(self._at_start):
            for has_targets in (False, True) if takes_checkpoints else (False,):
                yield GraphKey(requests, requests, 0, False, has_targets)
                if most and not self._is_costly:
                    yield GraphKey(requests, requests, most, False, has_targets)
                for drafts in range(1 if requests <= FEW else most, most + 1) if most else ():
                    propose = drafts if self._is_costly else most
                    yield GraphKey(requests, requests * (1 + drafts), propose, True, has_targets)

    def prompts(self) -> Iterator[GraphKey]:
        """Some of each kind of steps with prompts: there are too many sizes for all of them."""
        if not self._takes_prompts:
            return
        most = self.limits.max_drafts
        for requests in {self._prompt_requests[0], self._prompt_requests[-1]}:
            for propose in {0, most}:
                for has_drafts in {False, most > 0}:
                    yield GraphKey(requests, self._prompt_tokens[0], propose, has_drafts, has_prompts=True)

    @property
    def largest(self) -> GraphKey | None:
        """Of those with prompts: captured first, its memory serves all others."""
        if not self._takes_prompts:
            return None
        most = self.limits.max_drafts
        return GraphKey(self._prompt_requests[-1], self._prompt_tokens[-1], most, most > 0, has_prompts=True)

    def shape(self, key: GraphKey) -> BatchShape:
        return empty_shape(key, self.limits.max_drafts if key.has_drafts else 0, self.limits.max_len)

    def padded_size(self, key: GraphKey) -> PaddedSize:
        shape = self.shape(key)
        return PaddedSize(key.requests, key.tokens, logit_rows=shape.logit_rows, drafts=shape.most_drafts,
                          has_targets=key.has_targets)


def empty_shape(key: GraphKey, most_drafts: int, max_len: int) -> BatchShape:
    """Extents of a batch whose requests may each have as many tokens as fit. Only here is the worst-case length bound
    made."""
    logit_rows = key.requests * (1 + most_drafts) if key.has_prompts else key.tokens
    return BatchShape(
        key.requests, key.tokens, logit_rows, most_drafts, key.requests, key.tokens,
        (1 + most_drafts,) * key.requests, (), LengthBound(max_len), has_targets=key.has_targets,
        longest_short=1 + most_drafts if key.has_prompts else None,
    )  # fmt: skip


def empty_batch(shape: BatchShape, device: torch.device) -> torch.Tensor:
    """A batch of null rows, whose tokens and logit rows are all padding."""
    last = [shape.requests - 1]
    ints = [*[0] * (5 * shape.requests + 1), *last * shape.tokens, *[shape.tokens] * shape.tokens,
            *last * shape.logit_rows, *[shape.most_drafts + 1] * shape.logit_rows, *[0] * shape.logit_rows,
            *[-1] * (shape.has_targets * shape.requests)]
    return torch.tensor(ints, dtype=torch.int64, device=device)


def empty_plan(key: GraphKey, any_sampled: bool = True) -> StepPlan:
    return StepPlan(StepNeeds(any_sampled=any_sampled), StepExtras(), any_sampled, key.propose)


def _next(sizes: list[int], at_least: int) -> int:
    return sizes[bisect_left(sizes, at_least)]
