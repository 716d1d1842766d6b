"""The least time that a benchmark's decode steps can take: the bytes that they must move, divided by the bandwidth of
the device's memory.

A step reads every weight once (of experts only those that some token row chose, of embeddings a row for each token),
the keys and values of its requests' contexts, and reads and writes recurrent states; a proposal reads the drafter's
weights once for every draft. Prompts are not counted, and neither are bytes that a better kernel would not move.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.cache.groups import CacheLayout, LayerCache
from outrider.cache.kinds import RecurrentSpec
from outrider.drafters.base import Drafter
from outrider.layers import Embedding, Experts, LayeredModule, Linear, find_modules
from outrider.models.base import Model
from outrider.models.head import DraftHead
from outrider.runner.graphs.costs import best_seconds

CUDA_BYTES, CPU_BYTES = 2 << 30, 256 << 20  # far more than any cache holds
READS = 20  # back to back between two events of a GPU: the start and the end of one would be part of a single read
LOOKS, WARM_UP_LOOKS = 7, 2


def measure_bandwidth(device: torch.device) -> float:
    """Measure the bytes per second at which memory is read, by summing a large float32 tensor."""
    num_bytes = CUDA_BYTES if device.type == "cuda" else CPU_BYTES
    values = torch.ones(num_bytes // 4, device=device)
    # On a CPU the fastest read counts: other programs of the machine only make reads slower.
    seconds = _cuda_seconds(values) if device.type == "cuda" else best_seconds(values.sum, device, repeats=LOOKS)
    del values
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return num_bytes / seconds


def _cuda_seconds(values: torch.Tensor) -> float:
    """The seconds of one read, measured over many reads in a row: the median of several measurements."""
    taken = []
    with torch.cuda.device(values.device):
        for _ in range(WARM_UP_LOOKS + LOOKS):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(READS):
                values.sum()
            end.record()
            end.synchronize()
            taken.append(start.elapsed_time(end) / 1000 / READS)
    return statistics.median(taken[WARM_UP_LOOKS:])


@dataclass(frozen=True)
class Decoding:
    """The decode steps of a benchmark: lengths of requests, tokens per step and chosen drafts."""

    requests: Sequence[tuple[int, int]]  # prompt and answer tokens of each
    mean_run: float = 1.0  # tokens of a request in a step
    mean_drafts: float = 0.0  # drafts of a request in a step
    distinct_experts: float | None = None  # experts of a layer that some token row of a step chose

    @property
    def num_steps(self) -> float:
        """Return the number of decode steps. All requests run together, so it depends on the longest answer."""
        return max(outputs for _, outputs in self.requests) / self.mean_run

    @property
    def num_tokens(self) -> int:
        return sum(outputs for _, outputs in self.requests)


@dataclass(frozen=True)
class Weights:
    """The bytes of weights that a forward pass of the target or of a drafter reads."""

    dense: int
    experts: tuple[tuple[int, int], ...]  # per layer: how many, bytes of one

    def read(self, distinct: float | None) -> float:
        """The bytes that one pass reads if `distinct` different experts are chosen in each layer."""
        return self.dense + sum(size * min(count, distinct or count) for count, size in self.experts)


class Traffic:
    """The bytes that an engine's decode steps must move."""

    def __init__(self, model: Model, drafter: Drafter | None = None, layout: CacheLayout | None = None) -> None:
        """layout: how each layer stores its cache; without it the cache has the model's dtype."""
        own = find_modules([model], Experts)
        self.weights = Weights(_dense_bytes(model, own), _sizes(own))
        self.row_bytes = sum(e.format.weight_bytes / e.declared.num_outputs for e in _looked_up(model))
        self.caches = _stored_claims(model.cache_layers(), layout)
        self.draft_weights = Weights(0, ())
        self.draft_caches: list[LayerCache] = []
        if drafter is not None:
            theirs = find_modules(drafter.modules(), Experts)
            dense = drafter.weight_bytes() - sum(part.format.weight_bytes for part in theirs)
            dense += sum(_shared_bytes(head, model) for head in drafter.modules())
            self.draft_weights = Weights(dense, _sizes(theirs))
            self.draft_caches = _stored_claims(drafter.cache_layers(), layout)

    def total(self, work: Decoding) -> float:
        """The bytes that all steps together must move."""
        steps, passes = work.num_steps, work.num_steps * work.mean_drafts
        moved = steps * self.weights.read(work.distinct_experts) + work.num_tokens * self.row_bytes
        moved += passes * self.draft_weights.read(work.distinct_experts)
        for prompt, outputs in work.requests:
            own_steps = outputs / work.mean_run
            moved += sum(own_steps * _cache_bytes(layer, prompt, outputs) for layer in self.caches)
            moved += sum(own_steps * work.mean_drafts * _cache_bytes(layer, prompt, outputs)
                         for layer in self.draft_caches)
        return moved

    def floor(self, work: Decoding, bandwidth: float) -> float:
        """The tokens per second that no engine can exceed if it moves these bytes."""
        return work.num_tokens / (self.total(work) / bandwidth)


def _stored_claims(claims: list[LayerCache], layout: CacheLayout | None) -> list[LayerCache]:
    """Return the layers' cache requirements with the cache types of a layout. Recurrent layers are not part of a
    layout."""
    if layout is None:
        return claims
    return [claim if claim.is_recurrent else claim.stored_as(layout.groups_of(claim.layer)[0].spec.cache_type)
            for claim in claims]


def _cache_bytes(layer: LayerCache, prompt: int, outputs: int) -> float:
    """The bytes of a layer's cache that one step of a request moves, averaged over its answer."""
    spec = layer.spec
    if isinstance(spec, RecurrentSpec):
        return 2 * spec.row_bytes
    return spec.token_bytes * mean_context(prompt, outputs, spec.visible_tokens)


def mean_context(prompt: int, outputs: int, window: int | None) -> float:
    """The mean number of keys that a step sees, over steps with contexts from prompt + 1 to prompt + outputs tokens."""
    if window is None or prompt + outputs <= window:
        return prompt + (outputs + 1) / 2
    growing = max(0, window - prompt)  # steps before the window is full
    return (growing * (prompt + (growing + 1) / 2) + (outputs - growing) * window) / outputs


def _dense_bytes(model: Model, experts: Sequence[Experts]) -> int:
    total = sum(slot.nbytes for slot in model.weights().values())
    lookups = sum(e.format.weight_bytes for e in _looked_up(model))
    return total - lookups - sum(part.format.weight_bytes for part in experts)


def _looked_up(model: Model) -> list[Embedding]:
    """The embeddings of which only single rows are read, because they are not also the weight of a product."""
    formats = [linear.format for linear in find_modules([model], Linear)]
    return [e for e in find_modules([model], Embedding) if not any(held is e.format for held in formats)]


def _shared_bytes(head: LayeredModule, target: Model) -> int:
    """The bytes of the target's output weight if a head uses it, minus those of the head's embedding, of which only
    single rows are read."""
    if not isinstance(head, DraftHead) or hasattr(head, "lm_head"):  # a model, or a head whose output is its own
        return 0
    is_shared = head.own_output is None and head.rounded_output is None
    total = target.lm_head.format.weight_bytes if is_shared else 0
    return total if head.embedding is target.embed_tokens else total - head.embedding.format.weight_bytes


def _sizes(experts: Sequence[Experts]) -> tuple[tuple[int, int], ...]:
    return tuple((part.num_experts, part.format.weight_bytes // part.num_experts) for part in experts)
