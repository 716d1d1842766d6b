"""StepAdapters: adds the LoRA products of a step's adapters to the layers' outputs (`kernels/adapter_products.py`).

Every token row is computed separately and adds its terms in a fixed order, so its result does not depend on the
adapters of other rows. Rows without an adapter are not written.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from outrider.core.step_messages import DeltaReach
from outrider.features.adapters.arena import AdapterArena
from outrider.features.adapters.target import EmbeddingTarget, ExpansionTarget
from outrider.kernels import activations, moe, ops
from outrider.kernels.adapter_products import ExpertTargets, HeadColumns
from outrider.kernels.delta_tables import DeltaTables, RowSlots, TargetRange
from outrider.layers.context import LinearLayer, ProductChange, RowDeltas, StepFactors
from outrider.layers.moe import Experts


class StepAdapters(RowDeltas):
    def __init__(self, arena: AdapterArena, slots: torch.Tensor, reach: DeltaReach) -> None:
        """slots: [tokens] int64, the slot of each token row's adapter, or NO_SLOT. reach: the kinds of products that
        the adapters change."""
        self._arena, self._slots, self._reach = arena, slots, reach

    def of_rows(self, token_rows: torch.Tensor) -> StepAdapters:
        return type(self)(self._arena, self._slots[token_rows], self._reach)

    def within(self, reach: DeltaReach) -> StepAdapters:
        return type(self)(self._arena, self._slots, reach)

    def change(self, module: object) -> bool:
        return any(target.reach & self._reach for target in self._arena.targets.of_module.get(id(module), ()))

    @cached_property
    def _row_slots(self) -> RowSlots:
        return ops.sort_slots(self._slots)

    def factors(self) -> StepFactors:
        return StepFactors(self._row_slots, self._arena.tables, self._arena.targets.ranges)

    def begin(self, linear: LinearLayer, x: torch.Tensor, first: int = 0, stop: int | None = None) -> ProductChange:
        assert len(x) == len(self._slots), "the context is of other token rows"
        targets = self._arena.targets.ranges.get(id(linear))
        asked = range(0) if targets is None else targets.within(first, targets.ends[-1] if stop is None else stop)
        if targets is None or not self._arena.may_change(asked):
            return Unchanged(self, linear, x, first)
        return FactoredChange(self, linear, x, first, asked, self._row_slots, self._arena.tables, targets)

    def add_to(self, out: torch.Tensor, linear: LinearLayer, x: torch.Tensor, first: int) -> None:
        self.begin(linear, x, first, first + out.shape[1]).add_to(out)

    def add_embeddings(self, out: torch.Tensor, embedding: object, tokens: torch.Tensor, scale: float) -> None:
        (target,) = self._arena.targets.of_module[id(embedding)]
        assert isinstance(target, EmbeddingTarget)
        ops.add_adapter_embeddings(out, tokens, scale, self._row_slots, self._arena.tables, target.index)

    def mix(self, out: torch.Tensor, experts: object, x: torch.Tensor, routed: moe.Routed,
            added: torch.Tensor | None) -> None:
        assert isinstance(experts, Experts)
        targets = ExpertTargets(*(target.index for target in self._arena.targets.of_module[id(experts)]))
        parts = experts.format.plain_parts
        assert parts is not None, "an adapter changes experts that have no numbers"
        ops.mix_adapted_experts(out, x, routed.ids, routed.weights, *parts, experts.activation, added, self._row_slots,
                                self._arena.tables, targets)

    def add_to_latents(self, out: torch.Tensor, expansion: object, queries: torch.Tensor) -> None:
        target = self._expansion(expansion)
        declared = target.expansion.declared
        columns = HeadColumns(declared.key_dim + declared.value_dim, 0, declared.key_dim)
        ops.add_head_adapters(queries, out, self._row_slots, self._arena.tables, target.index, columns, True)

    def add_to_values(self, out: torch.Tensor, expansion: object, latents: torch.Tensor) -> None:
        target = self._expansion(expansion)
        declared = target.expansion.declared
        columns = HeadColumns(declared.key_dim + declared.value_dim, declared.key_dim, declared.value_dim)
        ops.add_head_adapters(latents, out, self._row_slots, self._arena.tables, target.index, columns, False)

    def _expansion(self, expansion: object) -> ExpansionTarget:
        (target,) = self._arena.targets.of_module[id(expansion)]
        assert isinstance(target, ExpansionTarget)
        return target


class Unchanged(ProductChange):
    """Stands for the change of a product that no adapter of this step changes: adds nothing."""

    def add_to(self, out: torch.Tensor) -> None: ...


@dataclass(frozen=True)
class FactoredChange(ProductChange):
    """The change of a layer's product by adapters, computed with their two low-rank factors. The product with the first
    factor is launched right after the layer's own product, so that a GPU can run both at the same time."""

    asked: range  # the targets that have some of the output features
    rows: RowSlots
    tables: DeltaTables
    targets: TargetRange

    def add_to(self, out: torch.Tensor) -> None:
        ops.add_adapters(self._inner(), out, self.first, self.rows, self.tables, self.targets)

    def activated(self, out: torch.Tensor, activation: str) -> torch.Tensor:
        if activation not in activations.GATED:
            return super().activated(out, activation)
        return ops.add_adapters_gated(self._inner(), out, activation, self.rows, self.tables, self.targets)

    def _inner(self) -> torch.Tensor:
        return ops.reduce_adapters(self.x, self.rows, self.tables, self.asked)
