"""LatentMixer: layers that keep one compressed vector per token, and how they find the positions they attend to.

Queries arrive in the latent space (the key projection is absorbed into them), so the cache is read as it is stored, by
requests with any number of token rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from outrider.cache.groups import Group
from outrider.cache.kinds import IndexedLatentSpec, LatentSpec, ScaledIndexSpec
from outrider.kernels import ops
from outrider.kernels.latent import NUM_COUNTERS, TokenContexts
from outrider.kernels.latent_inputs import IndexInputs, RopeRows
from outrider.kernels.ops import Operation
from outrider.mixers.base import EVERY_LENGTH, Mixer
from outrider.mixers.batch import BatchView, KeysFrom, check_rows
from outrider.mixers.pool import DevicePool

MAX_COUNTED = 64  # token rows of batches whose indexers' counters are zeroed together


@dataclass(frozen=True)
class EveryPosition:
    """The layer attends to its whole context."""


@dataclass(frozen=True)
class IndexedPositions:
    """The layer has an indexer and attends to the positions that it chooses."""

    num_heads: int
    head_dim: int
    top_k: int
    lasts_for_drafting: bool = False  # further drafting passes take the choice of the first one
    has_fp8_keys: bool = False  # index keys are stored in fp8, each with a scale


@dataclass(frozen=True)
class SharedPositions:
    """The layer attends to the positions that the last indexer before it chose."""


AttendsTo = EveryPosition | IndexedPositions | SharedPositions


@dataclass(frozen=True)
class LatentLayer:
    """The arithmetic of one latent attention layer, independent of where its cache lies."""

    index: int
    num_heads: int
    latent_dim: int
    rope_dim: int
    scale: float
    attends_to: AttendsTo
    # [heads] float32 (float64 stays): the score of one more key that every query sees, whose value is 0.
    sinks: torch.Tensor | None = field(default=None, compare=False)

    def of_rank(self, num_ranks: int) -> LatentLayer:
        """The layer of one of several ranks, which share the heads. Each rank keeps whole latents."""
        heads = self.num_heads // num_ranks
        return replace(self, num_heads=heads, sinks=None if self.sinks is None else self.sinks.new_empty(heads))

    def cache_spec(self, itemsize: int) -> LatentSpec:
        if isinstance(self.attends_to, IndexedPositions):
            spec = ScaledIndexSpec if self.attends_to.has_fp8_keys else IndexedLatentSpec
            return spec(self.latent_dim, self.rope_dim, itemsize, self.attends_to.head_dim)
        return LatentSpec(self.latent_dim, self.rope_dim, itemsize)


@dataclass(frozen=True)
class GroupPlan:
    """What the layers of one group share in one step."""

    slots: torch.Tensor  # [tokens]
    contexts: TokenContexts
    num_positions: int  # no context is longer


class LatentOperations(NamedTuple):
    """The operations on the cache of latent layers, in the ordinary mode or in exact mode."""

    write: Operation[..., tuple[torch.Tensor, torch.Tensor]]
    choose: Operation[..., None]
    attend: Operation[..., torch.Tensor]
    attend_everywhere: Operation[..., torch.Tensor]

    @classmethod
    def from_mode(cls, exact: bool) -> LatentOperations:
        return cls(ops.write_latents.variant(exact), ops.choose_positions.variant(exact),
                   ops.latent_attention.variant(exact), ops.dense_latent_attention.variant(exact))


ORDINARY = LatentOperations.from_mode(exact=False)


class LatentNorms(NamedTuple):
    """Norms of a layer's compressed vectors, and the rope of its index keys."""

    q: torch.Tensor | None  # scale of the RMS norm of compressed queries; None where queries are not compressed
    latent: torch.Tensor  # scale of the RMS norm of latents
    index_key: tuple[torch.Tensor, torch.Tensor] | None  # weight and bias of the norm of index keys
    eps: float
    index_in_pairs: bool


class VisibleRanges(NamedTuple):
    """The positions that an indexer may choose from for each token row: [first, stop) of the token's request. Both
    tensors are [tokens]."""

    first: torch.Tensor
    stop: torch.Tensor


@dataclass(frozen=True)
class NotChosen:
    """No indexer of the pass has run."""


@dataclass(frozen=True)
class WholeContext:
    """The indexer was not asked: it may choose as many positions as the longest context has."""


@dataclass(frozen=True)
class ListedPositions:
    """The indexer listed positions for each token row."""

    positions: torch.Tensor  # [tokens, top_k]


@dataclass(frozen=True)
class KeptChoice:
    """The indexers of this pass choose nothing: the choice of an earlier pass holds, in the contexts of that pass."""

    visible: VisibleRanges
    choice: WholeContext | ListedPositions


class ChosenPositions:
    """The last choice of a pass over the layers. A new one belongs to every pass, so that none outlives its batch."""

    def __init__(self, counters: Iterable[torch.Tensor] = ()) -> None:
        """counters: for each indexer of the pass, see `kernels.latent.choose_positions`; or for none of them."""
        self.latest: NotChosen | WholeContext | ListedPositions | KeptChoice = NotChosen()
        self._counters = iter(counters)

    def take_counters(self) -> torch.Tensor | None:
        return next(self._counters, None)


@dataclass(frozen=True, slots=True)
class BoundLatentLayer:
    """One latent layer in one step, as a model calls it."""

    layer: LatentLayer
    cache: dict[str, torch.Tensor]
    plan: GroupPlan
    chosen: ChosenPositions
    operations: LatentOperations = ORDINARY

    def write(self, compressed: torch.Tensor, norms: LatentNorms,
              rope: RopeRows) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores the latents and index keys of compressed [tokens, q | latent | rope | index key | head weights].
        Returns q, normed, and the indexer's head weights, scaled."""
        index, attends_to = None, self.layer.attends_to
        if isinstance(attends_to, IndexedPositions):
            assert norms.index_key is not None
            scale = (attends_to.num_heads * attends_to.head_dim) ** -0.5
            index = IndexInputs(attends_to.num_heads, *norms.index_key, scale, norms.index_in_pairs,
                                self.cache["index_key"], self.cache.get("index_scale"))
        return self.operations.write(compressed, norms.q, norms.latent, norms.eps, rope, self.plan.slots,
                                     self.cache["latent"], index)

    def choose(self, q: torch.Tensor, weights: torch.Tensor) -> None:
        """Chooses positions by q [tokens, heads, dim] and weights [tokens, heads] for this layer and for those after it
        that share. A context no longer than top_k is taken whole."""
        assert isinstance(self.layer.attends_to, IndexedPositions)
        top_k, plan = self.layer.attends_to.top_k, self.plan
        if isinstance(self.chosen.latest, KeptChoice):
            return
        if plan.num_positions <= top_k:
            self.chosen.latest = WholeContext()
            return
        positions = torch.empty(q.shape[0], top_k, dtype=torch.int32, device=q.device)
        self.chosen.latest = ListedPositions(positions)
        self.operations.choose(q, weights, self.cache["index_key"], plan.contexts, positions,
                               self.cache.get("index_scale"), self.chosen.take_counters())

    def __call__(self, q: torch.Tensor) -> torch.Tensor:
        """q [tokens, heads, latent | rope], after `write`. Returns [tokens, heads, latent]."""
        layer, cache = self.layer, self.cache["latent"]
        contexts, positions = self._seen()
        if positions is None:
            return self.operations.attend_everywhere(q, cache, contexts, self.plan.num_positions, layer.scale,
                                                     layer.latent_dim, layer.sinks)
        return self.operations.attend(q, cache, contexts, positions, layer.scale, layer.latent_dim, layer.sinks)

    def values(self, q: torch.Tensor, to_values: torch.Tensor) -> torch.Tensor | None:
        """Attends, and multiplies each head's result with its matrix [heads, values, latent]: [tokens, heads, values].
        None where no kernel does both."""
        layer = self.layer
        given = (q, self.cache["latent"], *self._seen(), self.plan.num_positions, layer.scale, to_values, layer.sinks)
        return ops.latent_values(*given) if ops.latent_values.has_kernel(*given) else None

    def _seen(self) -> tuple[TokenContexts, torch.Tensor | None]:
        """The contexts and the positions that are chosen in them, None for all."""
        contexts, latest = self.plan.contexts, self.chosen.latest
        if isinstance(self.layer.attends_to, EveryPosition):
            return contexts, None
        if isinstance(latest, KeptChoice):
            contexts = contexts._replace(first=latest.visible.first, stop=latest.visible.stop)
            latest = latest.choice
        assert not isinstance(latest, NotChosen), f"layer {self.layer.index} attends before an indexer has chosen"
        return contexts, latest.positions if isinstance(latest, ListedPositions) else None

    def keep_choice(self, earlier: BoundLatentLayer, token_rows: torch.Tensor) -> None:
        """Attend to what an earlier pass chose for `token_rows`, one for each token row of this pass."""
        before, choice = earlier.plan.contexts, earlier.chosen.latest
        assert isinstance(choice, WholeContext | ListedPositions), "the earlier pass made no choice of its own"
        is_live = self.plan.contexts.stop > 0  # other token rows see nothing
        visible = VisibleRanges(before.first[token_rows], torch.where(is_live, before.stop[token_rows], 0))
        if isinstance(choice, ListedPositions):
            choice = ListedPositions(choice.positions[token_rows])
        self.chosen.latest = KeptChoice(visible, choice)


class LatentMixer(Mixer):
    """A model's latent layers with their parts of the pool."""

    def __init__(self, layers: Sequence[LatentLayer], pool: DevicePool, backend: Any) -> None:
        self._layers = [(layer, pool.layer(layer.index), pool.layout.groups_of(layer.index)[0]) for layer in layers]
        self._groups = {group.index: group for _, _, group in self._layers}
        self._operations = ORDINARY
        # Up to these lengths an indexer would choose every position, and is not asked.
        lengths = [own.attends_to.top_k for own in layers if isinstance(own.attends_to, IndexedPositions)]
        self.whole_len = min(lengths, default=EVERY_LENGTH)

    @staticmethod
    def is_capturable(spec: LatentSpec) -> bool:
        """Whether kernels serve the layers. The torch twins would work on the greatest length there may be."""
        return spec.itemsize <= torch.float32.itemsize

    def set_exact(self, exact: bool) -> None:
        self._operations = LatentOperations.from_mode(exact)

    def bind(self, view: BatchView) -> dict[int, BoundLatentLayer]:
        plans = {index: plan_group(view, group) for index, group in self._groups.items()}
        chosen = ChosenPositions(self._make_counters(view))
        return {layer.index: BoundLatentLayer(layer, cache, plans[group.index], chosen, self._operations)
                for layer, cache, group in self._layers}  # fmt: skip

    def _make_counters(self, view: BatchView) -> tuple[torch.Tensor, ...]:
        """Counters of zero for all indexers of a small batch, made by one fill: a fill in every layer would take longer
        than the counting. Empty for large batches, which need no counters."""
        num_tokens, device = view.positions.shape[0], view.positions.device
        num_choices = sum(isinstance(layer.attends_to, IndexedPositions)
                          and layer.attends_to.top_k < view.max_length.tokens for layer, _, _ in self._layers)
        if not num_choices or num_tokens > MAX_COUNTED or device.type == "cpu":
            return ()
        return torch.zeros(num_choices, num_tokens, NUM_COUNTERS, dtype=torch.int32, device=device).unbind()

    def carry(self, earlier: Mapping[int, Any], later: Mapping[int, Any], token_rows: torch.Tensor) -> None:
        """Keep what indexers of an earlier pass chose for `token_rows` in a later pass with one token row for each of
        them, where the layers say so."""
        for layer, _, _ in self._layers:
            if isinstance(layer.attends_to, IndexedPositions) and layer.attends_to.lasts_for_drafting:
                later[layer.index].keep_choice(earlier[layer.index], token_rows)


def plan_group(view: BatchView, group: Group) -> GroupPlan:
    check_rows(view, group)
    slots = view.slots(group)
    starts = view.visible.starts if isinstance(view.visible, KeysFrom) else None
    first, stop = ops.visible_ranges(view.positions, slots, view.request_of, view.lengths, starts)
    contexts = TokenContexts(view.page_table(group), view.request_of, first, stop)
    return GroupPlan(slots, contexts, view.max_length.tokens)
