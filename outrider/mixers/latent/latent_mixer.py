"""LatentMixer: serves layers of latent attention (MLA), which keep one compressed vector per token, and the ways in
which they choose the positions to attend to.

Queries arrive in the latent space (the key projection is absorbed into them), so the cache is read as it is stored. A
request may have any number of token rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from outrider.cache.groups import Group
from outrider.cache.kinds import IndexedLatentSpec, LatentSpec, PooledIndexSpec, ScaledIndexSpec
from outrider.kernels import ops
from outrider.kernels.latent import NUM_COUNTERS, TokenContexts
from outrider.kernels.latent_inputs import IndexInputs, RopeRows
from outrider.kernels.ops import Operation
from outrider.kernels.pooled_keys import PoolCells, PoolWeights
from outrider.kernels.token_blocks import TokenBlocks
from outrider.mixers.batch import BatchView, KeysFrom, check_rows
from outrider.mixers.mixer import EVERY_LENGTH, Mixer
from outrider.mixers.pool import DevicePool

MAX_COUNTED = 64  # token rows of batches whose indexers' counters are zeroed together


@dataclass(frozen=True)
class EveryPosition:
    """The layer attends to its whole context. It has no indexer."""


@dataclass(frozen=True)
class IndexedPositions:
    """The layer has an indexer and attends to the positions that it chooses."""

    num_heads: int
    head_dim: int
    top_k: int
    lasts_for_drafting: bool = False  # further drafting passes take the choice of the first one
    has_fp8_keys: bool = False  # index keys are stored in fp8, each with a scale


    @property
    def whole_len(self) -> int:
        """Return the length, in tokens, up to which all positions of a context are chosen."""
        return self.top_k


@dataclass(frozen=True)
class PooledPositions(IndexedPositions):
    """The layer's indexer chooses `top_k` blocks. The tokens after the last whole block are always attended to."""

    blocks: TokenBlocks = field(kw_only=True)

    @property
    def whole_len(self) -> int:
        return (self.top_k + 1) * self.blocks.size - 1


@dataclass(frozen=True)
class SharedPositions:
    """The layer attends to the positions that the nearest indexer in an earlier layer chose."""


AttendsTo = EveryPosition | IndexedPositions | SharedPositions


@dataclass(frozen=True)
class LatentLayer:
    """A model's description of one latent attention layer (MLA), without the place of its cache."""

    index: int
    num_heads: int
    latent_dim: int
    rope_dim: int
    scale: float
    attends_to: AttendsTo
    # [heads] float32 (float64 stays): the score of one more key that every query sees, whose value is 0.
    sinks: torch.Tensor | None = field(default=None, compare=False)

    def of_rank(self, num_ranks: int) -> LatentLayer:
        """Return the layer as one of several ranks computes it. Heads are divided among ranks; each rank keeps whole
        latents."""
        heads = self.num_heads // num_ranks
        return replace(self, num_heads=heads, sinks=None if self.sinks is None else self.sinks.new_empty(heads))

    def cache_spec(self, itemsize: int) -> LatentSpec:
        if isinstance(self.attends_to, PooledPositions):
            return PooledIndexSpec(self.latent_dim, self.rope_dim, itemsize, self.attends_to.head_dim)
        if isinstance(self.attends_to, IndexedPositions):
            spec = ScaledIndexSpec if self.attends_to.has_fp8_keys else IndexedLatentSpec
            return spec(self.latent_dim, self.rope_dim, itemsize, self.attends_to.head_dim)
        return LatentSpec(self.latent_dim, self.rope_dim, itemsize)


@dataclass(frozen=True)
class GroupPlan:
    """The tensors and sizes of one step that all layers of a cache group share."""

    slots: torch.Tensor  # [tokens]
    contexts: TokenContexts
    num_positions: int  # no context is longer


@dataclass(frozen=True)
class BlockPlan(GroupPlan):
    """The plan of a cache group whose indexers choose blocks."""

    positions: torch.Tensor  # [tokens] in their requests
    offsets: torch.Tensor  # [tokens] how many tokens of its request a token has before it in this step
    visible: Mapping[TokenBlocks, TokenContexts]  # the whole blocks that each token row sees


class LatentOperations(NamedTuple):
    """The operations on the latent cache, each in its ordinary or its exact variant."""

    write: Operation[..., tuple[torch.Tensor, torch.Tensor]]
    choose: Operation[..., None]
    attend: Operation[..., torch.Tensor]
    attend_everywhere: Operation[..., torch.Tensor]
    write_pooled: Operation[..., torch.Tensor]

    @classmethod
    def from_mode(cls, exact: bool) -> LatentOperations:
        return cls(ops.write_latents.variant(exact), ops.choose_positions.variant(exact),
                   ops.latent_attention.variant(exact), ops.dense_latent_attention.variant(exact),
                   ops.write_pooled_keys.variant(exact))


ORDINARY = LatentOperations.from_mode(exact=False)


class LatentNorms(NamedTuple):
    """Norms of a layer's compressed vectors, and the rope of its index keys."""

    q: torch.Tensor | None  # scale of the RMS norm of compressed queries; None where queries are not compressed
    latent: torch.Tensor  # scale of the RMS norm of latents
    index_key: tuple[torch.Tensor, torch.Tensor] | None  # weight and bias of the norm of index keys
    eps: float
    index_in_pairs: bool
    index_eps: float = 1e-6  # of the norm of index keys
    place_bias: torch.Tensor | None = None  # [size, dim] of gates, where the indexer chooses blocks


class VisibleRanges(NamedTuple):
    """The positions that an indexer may choose from for each token row: [first, stop) of the token's request. Both
    tensors are [tokens]."""

    first: torch.Tensor
    stop: torch.Tensor


@dataclass(frozen=True)
class NotChosen:
    """State of a pass over the layers in which no indexer has run yet."""


@dataclass(frozen=True)
class WholeContext:
    """State of a pass whose indexers are not run, because they would choose every position even of the longest context.
    """


@dataclass(frozen=True)
class ListedPositions:
    """State of a pass in which an indexer has listed positions for each token row."""

    positions: torch.Tensor  # [tokens, most chosen]


@dataclass(frozen=True)
class KeptChoice:
    """State of a drafting pass whose indexers are not run. It uses the choice of an earlier pass, limited to the
    contexts of that pass."""

    visible: VisibleRanges
    choice: WholeContext | ListedPositions


class ChosenPositions:
    """The last choice that an indexer made in a pass over the layers. Every pass has a new object, so that no choice is
    used for another batch."""

    def __init__(self, counters: Iterable[torch.Tensor] = ()) -> None:
        """counters: one for each indexer of the pass, for `kernels.latent.choose_positions`; empty if they are not
        used."""
        self.latest: NotChosen | WholeContext | ListedPositions | KeptChoice = NotChosen()
        self._counters = iter(counters)

    def take_counters(self) -> torch.Tensor | None:
        return next(self._counters, None)


@dataclass(frozen=True, slots=True)
class BoundLatentLayer:
    """One latent layer bound to one step; the model calls it to attend."""

    layer: LatentLayer
    cache: dict[str, torch.Tensor]
    plan: GroupPlan
    chosen: ChosenPositions
    operations: LatentOperations = ORDINARY

    def write(self, compressed: torch.Tensor, norms: LatentNorms,
              rope: RopeRows) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the latents and index keys of compressed [tokens, q | latent | rope | index key | head weights]. Where
        the indexer chooses blocks, gates follow the head weights. Returns the normed q and the scaled head weights of
        the indexer."""
        index, attends_to = None, self.layer.attends_to
        if isinstance(attends_to, PooledPositions):
            return self._write_pooled(compressed, norms, rope, attends_to)
        if isinstance(attends_to, IndexedPositions):
            assert norms.index_key is not None
            scale = (attends_to.num_heads * attends_to.head_dim) ** -0.5
            index = IndexInputs(attends_to.num_heads, *norms.index_key, scale, norms.index_in_pairs,
                                self.cache["index_key"], self.cache.get("index_scale"), norms.index_eps)
        return self.operations.write(compressed, norms.q, norms.latent, norms.eps, rope, self.plan.slots,
                                     self.cache["latent"], index)

    def _write_pooled(self, compressed: torch.Tensor, norms: LatentNorms, rope: RopeRows,
                      index: PooledPositions) -> tuple[torch.Tensor, torch.Tensor]:
        assert isinstance(self.plan, BlockPlan) and norms.index_key is not None and norms.place_bias is not None
        plan, width = self.plan, compressed.shape[1] - 2 * index.head_dim - index.num_heads
        q, _ = self.operations.write(compressed[:, :width], norms.q, norms.latent, norms.eps, rope, plan.slots,
                                     self.cache["latent"], None)
        weights = PoolWeights(*norms.index_key, norms.place_bias, norms.index_eps,
                              (index.num_heads * index.head_dim) ** -0.5)
        cells = PoolCells(plan.slots, plan.positions, plan.offsets, self.cache["index_key"], self.cache["index_gate"])
        return q, self.operations.write_pooled(compressed[:, width:], weights, cells, plan.contexts, index.blocks)

    def choose(self, q: torch.Tensor, weights: torch.Tensor) -> None:
        """Choose positions by q [tokens, heads, dim] and weights [tokens, heads], for this layer and for later layers
        that share its choice. If a context has no more positions than the limit, all are chosen."""
        index, plan = self.layer.attends_to, self.plan
        assert isinstance(index, IndexedPositions)
        if isinstance(self.chosen.latest, KeptChoice):
            return
        if plan.num_positions <= index.whole_len:
            self.chosen.latest = WholeContext()
            return
        keys, contexts = self.cache["index_key"], plan.contexts
        if isinstance(index, PooledPositions):
            assert isinstance(plan, BlockPlan)
            keys, contexts = index.blocks.keys(keys), plan.visible[index.blocks]
        chosen = torch.empty(q.shape[0], index.top_k, dtype=torch.int32, device=q.device)
        self.operations.choose(q, weights, keys, contexts, chosen, self.cache.get("index_scale"),
                               self.chosen.take_counters())
        if isinstance(index, PooledPositions):
            chosen = ops.list_blocks(plan.contexts, chosen, index.blocks)
        self.chosen.latest = ListedPositions(chosen)

    def __call__(self, q: torch.Tensor) -> torch.Tensor:
        """Attend with q [tokens, heads, latent | rope], after `write`. Returns [tokens, heads, latent]."""
        layer, cache = self.layer, self.cache["latent"]
        contexts, positions = self._seen()
        if positions is None:
            return self.operations.attend_everywhere(q, cache, contexts, self.plan.num_positions, layer.scale,
                                                     layer.latent_dim, layer.sinks)
        return self.operations.attend(q, cache, contexts, positions, layer.scale, layer.latent_dim, layer.sinks)

    def values(self, q: torch.Tensor, to_values: torch.Tensor) -> torch.Tensor | None:
        """Attend, and multiply each head's result with its matrix [heads, values, latent]: [tokens, heads, values].
        Returns None if no kernel does both."""
        layer = self.layer
        given = (q, self.cache["latent"], *self._seen(), self.plan.num_positions, layer.scale, to_values, layer.sinks)
        return ops.latent_values(*given) if ops.latent_values.has_kernel(*given) else None

    def _seen(self) -> tuple[TokenContexts, torch.Tensor | None]:
        """Return the context of each token row, and the positions chosen in it; None if all positions are read."""
        contexts, latest = self.plan.contexts, self.chosen.latest
        if isinstance(self.layer.attends_to, EveryPosition):
            return contexts, None
        if isinstance(latest, KeptChoice):
            contexts = contexts._replace(first=latest.visible.first, stop=latest.visible.stop)
            latest = latest.choice
        assert not isinstance(latest, NotChosen), f"layer {self.layer.index} attends before an indexer has chosen"
        return contexts, latest.positions if isinstance(latest, ListedPositions) else None

    def keep_choice(self, earlier: BoundLatentLayer, token_rows: torch.Tensor) -> None:
        """Attend to the positions that an earlier pass chose. token_rows: the row of that pass for each token row of
        this pass."""
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
        lengths = [own.attends_to.whole_len for own in layers if isinstance(own.attends_to, IndexedPositions)]
        self.whole_len = min(lengths, default=EVERY_LENGTH)
        self._blocks: dict[int, set[TokenBlocks]] = {}  # by group
        for layer, _, group in self._layers:
            if isinstance(layer.attends_to, PooledPositions):
                blocks = layer.attends_to.blocks
                check_block_size(layer.index, blocks.size, group.page_tokens)
                self._blocks.setdefault(group.index, set()).add(blocks)

    @staticmethod
    def is_capturable(spec: LatentSpec) -> bool:
        """Whether kernels serve the layers. The plain torch versions would compute for the greatest length that is
        allowed."""
        return spec.itemsize <= torch.float32.itemsize

    def set_exact(self, exact: bool) -> None:
        self._operations = LatentOperations.from_mode(exact)

    def bind(self, view: BatchView) -> dict[int, BoundLatentLayer]:
        plans = {index: self._plan(view, group) for index, group in self._groups.items()}
        chosen = ChosenPositions(self._make_counters(view))
        return {layer.index: BoundLatentLayer(layer, cache, plans[group.index], chosen, self._operations)
                for layer, cache, group in self._layers}

    def _plan(self, view: BatchView, group: Group) -> GroupPlan:
        made, blocks = plan_group(view, group), self._blocks.get(group.index)
        if blocks is None:
            return made
        is_asked = made.num_positions > self.whole_len
        visible = {each: each.visible(made.contexts) for each in blocks if is_asked}
        return BlockPlan(made.slots, made.contexts, made.num_positions, view.positions, step_offsets(view), visible)

    def _make_counters(self, view: BatchView) -> tuple[torch.Tensor, ...]:
        """Return zeroed counters for all indexers of a small batch. One fill makes them all, because a fill in every
        layer would take longer than the counting. Empty for large batches, which need no counters."""
        num_tokens, device = view.positions.shape[0], view.positions.device
        num_choices = sum(isinstance(layer.attends_to, IndexedPositions)
                          and layer.attends_to.whole_len < view.max_length.tokens for layer, _, _ in self._layers)
        if not num_choices or num_tokens > MAX_COUNTED or device.type == "cpu":
            return ()
        return torch.zeros(num_choices, num_tokens, NUM_COUNTERS, dtype=torch.int32, device=device).unbind()

    def carry(self, earlier: Mapping[int, Any], later: Mapping[int, Any], token_rows: torch.Tensor) -> None:
        """Reuse the choices of an earlier pass in a later pass, for layers that ask for it. The later pass has one
        token row for each of `token_rows` of the earlier pass."""
        for layer, _, _ in self._layers:
            if isinstance(layer.attends_to, IndexedPositions) and layer.attends_to.lasts_for_drafting:
                later[layer.index].keep_choice(earlier[layer.index], token_rows)


def step_offsets(view: BatchView) -> torch.Tensor:
    """Return [tokens]: how many tokens of the same request come before each token in this step."""
    rows = torch.arange(view.num_tokens, device=view.positions.device)
    return rows - view.query_starts[view.request_of]


def check_block_size(layer: int, size: int, page_tokens: int) -> None:
    if page_tokens % size:
        raise ValueError(f"layer {layer}: the indexer chooses blocks of {size} tokens, which must divide the page of "
                         f"{page_tokens} tokens: raise page_size to a multiple of {size}")


def plan_group(view: BatchView, group: Group) -> GroupPlan:
    check_rows(view, group)
    slots = view.slots(group)
    starts = view.visible.starts if isinstance(view.visible, KeysFrom) else None
    first, stop = ops.visible_ranges(view.positions, slots, view.request_of, view.lengths, starts)
    contexts = TokenContexts(view.page_table(group), view.request_of, first, stop)
    return GroupPlan(slots, contexts, view.max_length.tokens)
