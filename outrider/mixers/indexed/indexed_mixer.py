"""IndexedMixer: layers that keep keys and values in pages and attend only to the blocks of a context that an indexer
chooses.

If all contexts of a batch are so short that every block is chosen, the attention backend serves the batch as for other
layers. Longer contexts have operations of their own (`kernels/token_blocks.py`). Exact mode uses these operations for
all batches, so that the order of additions does not depend on the longest context.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from outrider.cache.groups import Group
from outrider.cache.kinds import IndexedSpec
from outrider.core import Limits
from outrider.kernels import ops
from outrider.kernels.latent import TokenContexts
from outrider.kernels.latent_inputs import RopeRows
from outrider.kernels.token_blocks import TokenBlocks, every_block
from outrider.mixers.batch import BatchView
from outrider.mixers.latent.latent_mixer import check_block_size, plan_group, step_offsets
from outrider.mixers.mixer import EVERY_LENGTH, Mixer
from outrider.mixers.paged.backend import AttentionLayer, Backend, KeyValueCache
from outrider.mixers.pool import DevicePool


@dataclass(frozen=True)
class BlockChoice:
    """The rule by which a layer's indexer chooses blocks."""

    num_heads: int
    head_dim: int
    top_k: int  # blocks that it chooses
    blocks: TokenBlocks

    @property
    def whole_len(self) -> int:
        """Return the length, in tokens, up to which all blocks of a context are chosen."""
        return (self.top_k + 1) * self.blocks.size - 1


@dataclass(frozen=True)
class IndexedLayer(AttentionLayer):
    """A model's description of one layer that attends to chosen blocks of tokens."""

    choice: BlockChoice = field(kw_only=True)

    def cache_spec(self, itemsize: int) -> IndexedSpec:  # type: ignore[override]
        return IndexedSpec(self.num_kv_heads, self.head_dim, itemsize, self.choice.head_dim)


class BlockInputs(NamedTuple):
    """The tensors of one step from which an indexer scores blocks."""

    q: torch.Tensor  # [tokens, index heads, index dim] normed and rotated
    key: torch.Tensor  # [tokens, index dim] as projected
    gain: torch.Tensor  # [index dim] scale of the norm of a block's key
    eps: float
    table: torch.Tensor  # [positions, cos | sin] the rope of blocks' keys


@dataclass(frozen=True)
class IndexedPlan:
    """The tensors and sizes of one step that all layers of a cache group share."""

    slots: torch.Tensor  # [tokens]
    positions: torch.Tensor  # [tokens] in their requests
    offsets: torch.Tensor  # [tokens] how many tokens of its request a token has before it in this step
    contexts: TokenContexts
    num_positions: int  # no context is longer
    attention: Any  # the backend's plan; None if some context is too long to be attended whole


@dataclass(frozen=True, slots=True)
class BoundIndexedLayer:
    """One layer bound to one step; the model calls it to attend."""

    layer: IndexedLayer
    backend: Backend
    cache: KeyValueCache
    index_keys: torch.Tensor  # [pages, page tokens, index dim]
    plan: IndexedPlan
    exact: bool

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, index: BlockInputs) -> torch.Tensor:
        """Attend. q [tokens, heads, dim], k and v [tokens, kv heads, dim], normed and rotated. Returns [tokens, heads *
        dim]."""
        plan, layer, choice = self.plan, self.layer, self.layer.choice
        ops.write_block_keys(index.key, index.gain, index.eps, RopeRows(plan.positions, index.table), plan.slots,
                             plan.offsets, plan.contexts, self.index_keys, choice.blocks)
        if plan.num_positions <= choice.whole_len and not self.exact:
            return self.backend.run(layer, self.cache, q, k, v, plan.attention)
        ops.write_keys_values(k, v, plan.slots, self.cache.k, self.cache.v)
        attend = ops.block_attention.variant(self.exact)
        return attend(q, self.cache.k, self.cache.v, plan.contexts, self._chosen(index.q), layer.scale,
                      choice.blocks).flatten(1)

    def _chosen(self, q: torch.Tensor) -> torch.Tensor:
        """Return [tokens, top_k]: the blocks with the highest scores. A block's score is the sum over index heads of
        relu(q . key)."""
        choice = self.layer.choice
        seen = choice.blocks.visible(self.plan.contexts)
        if self.plan.num_positions <= choice.whole_len:
            return every_block(seen, choice.top_k)
        chosen = torch.empty(q.shape[0], choice.top_k, dtype=torch.int32, device=q.device)
        wide = torch.promote_types(q.dtype, torch.float32)
        weights = torch.ones(q.shape[:2], dtype=wide, device=q.device)
        choose = ops.choose_positions.variant(self.exact)
        choose(q, weights, choice.blocks.keys(self.index_keys), seen, chosen)
        return chosen


class IndexedMixer(Mixer):
    """A model's layers that attend to chosen blocks of tokens, with their parts of the pool."""

    def __init__(self, layers: Sequence[IndexedLayer], pool: DevicePool, backend: Backend) -> None:
        self.backend, self._exact = backend, False
        backend.attach(len(pool.data), pool.data.device)
        self._layers = []
        for layer in layers:
            group, parts = pool.layout.groups_of(layer.index)[0], pool.layer(layer.index)
            check_block_size(layer.index, layer.choice.blocks.size, group.page_tokens)
            cache = KeyValueCache(parts["k"], parts["v"])
            backend.check_cache(cache)
            self._layers.append((layer, cache, parts["index_key"], group))
        self._groups = {group.index: group for *_, group in self._layers}
        self.whole_len = min((layer.choice.whole_len for layer in layers), default=EVERY_LENGTH)

    @staticmethod
    def is_capturable(spec: IndexedSpec) -> bool:
        """Whether kernels serve the layers. The plain torch versions would compute for the greatest length that is
        allowed."""
        return spec.itemsize <= torch.float32.itemsize

    def set_exact(self, exact: bool) -> None:
        self._exact = exact

    def bind(self, view: BatchView) -> Mapping[int, BoundIndexedLayer]:
        plans = {index: self._plan(view, group) for index, group in self._groups.items()}
        return {layer.index: BoundIndexedLayer(layer, self.backend, cache, index_keys, plans[group.index], self._exact)
                for layer, cache, index_keys, group in self._layers}

    def _plan(self, view: BatchView, group: Group) -> IndexedPlan:
        made = plan_group(view, group)
        needs_whole = view.max_length.tokens <= max(layer.choice.whole_len for layer, _, _, own in self._layers
                                                    if own.index == group.index)
        return IndexedPlan(made.slots, view.positions, step_offsets(view), made.contexts, made.num_positions,
                           self.backend.plan(view, group) if needs_whole else None)

    def prepare_capture(self, device: torch.device, limits: Limits) -> None:
        self.backend.prepare_capture(device, limits)
