"""StepAdapters: what adapters add to the products of a step's token rows.

Linear layers have an operation for that (`kernels/adapters.py`), which a captured step may hold. Embeddings, experts
and the latent expansion are computed in plain torch here, which reads the device. Every token row is computed alone
and in one order of additions, so its bits do not depend on the adapters of the rows beside it, and rows without an
adapter are not written.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch

from outrider.adapters.arena import AdapterArena
from outrider.adapters.host_adapter import FactorPlace
from outrider.adapters.targets import EmbeddingTarget, ExpansionTarget, ExpertsTarget, Target
from outrider.kernels import moe, ops
from outrider.kernels.adapters import NO_SLOT, RowSlots
from outrider.layers.context import LinearLayer, RowAdapters

exact_product = ops.linear.variant(exact=True)


class StepAdapters(RowAdapters):
    def __init__(self, arena: AdapterArena, slots: torch.Tensor) -> None:
        """slots: [tokens] int64, the slot of each token row's adapter, or NO_SLOT."""
        self._arena, self._slots = arena, slots

    def of_rows(self, token_rows: torch.Tensor) -> StepAdapters:
        return type(self)(self._arena, self._slots[token_rows])

    def change(self, module: object) -> bool:
        return any(self._arena.entries(target.index) for target in self._arena.targets.of_module.get(id(module), ()))

    @cached_property
    def _row_slots(self) -> RowSlots:
        return RowSlots.from_slots(self._slots)

    @cached_property
    def _rows_of_slot(self) -> dict[int, torch.Tensor]:
        """Token rows by the slot of their adapter. Reads the device."""
        used = [slot for slot in self._slots.unique().tolist() if slot != NO_SLOT]
        return {slot: (self._slots == slot).nonzero().flatten() for slot in used}

    def _adapted(self, target: Target) -> Iterator[tuple[FactorPlace, torch.Tensor]]:
        """The adapters that change a target, each with its token rows."""
        entries = self._arena.entries(target.index)
        for slot, rows in self._rows_of_slot.items() if entries else ():
            if slot in entries:
                yield entries[slot], rows

    def add_to(self, out: torch.Tensor, linear: LinearLayer, x: torch.Tensor, first: int) -> None:
        assert len(x) == len(out) == len(self._slots), "the context is of other token rows"
        targets = self._arena.targets.ranges.get(id(linear))
        if targets is not None:
            ops.add_adapters(x, out, first, self._row_slots, self._arena.tables, targets)

    def add_embeddings(self, out: torch.Tensor, embedding: object, tokens: torch.Tensor, scale: float) -> None:
        (target,) = self._arena.targets.of_module[id(embedding)]
        assert isinstance(target, EmbeddingTarget)
        declared = target.embedding.declared
        for entry, rows in self._adapted(target):
            a, b = self._arena.factors(entry, (target.vocab_size, entry.rank), (entry.rank, declared.num_inputs))
            _add_rows(out, rows, exact_product(a[tokens[rows]], b.t().contiguous()), entry.scale * scale)

    def mix(self, out: torch.Tensor, experts: object, x: torch.Tensor, routed: moe.Routed,
            added: torch.Tensor | None) -> None:
        first, down = self._arena.targets.of_module[id(experts)]
        assert isinstance(first, ExpertsTarget) and isinstance(down, ExpertsTarget)
        for slot, rows in self._rows_of_slot.items():
            entries = tuple(self._arena.entries(target.index).get(slot) for target in (first, down))
            if entries != (None, None):
                mixed = torch.stack([self._mix_row(x[row], routed.ids[row], routed.weights[row], (first, down), entries)
                                     for row in rows])
                own = mixed.to(out.dtype)
                out[rows] = own if added is None else own + added[rows]

    def _mix_row(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, targets: tuple[ExpertsTarget, ...],
                 entries: tuple[FactorPlace | None, ...]) -> torch.Tensor:
        """The weighted sum of one token row's experts: each product with what the adapter adds to it."""
        total = torch.zeros(targets[1].num_outputs, dtype=weights.dtype, device=x.device)
        parts = targets[0].experts.format.plain_parts
        assert parts is not None
        for expert, weight in zip(ids.tolist(), weights, strict=True):
            inner = self._expert(x[None], parts[0][expert], expert, targets[0], entries[0])
            inner = moe.activate(inner, targets[0].experts.activation)
            total += weight * self._expert(inner, parts[1][expert], expert, targets[1], entries[1])[0]
        return total

    def _expert(self, x: torch.Tensor, weight: torch.Tensor, expert: int, target: ExpertsTarget,
                entry: FactorPlace | None) -> torch.Tensor:
        out: torch.Tensor = exact_product(x, weight)
        if entry is None:
            return out
        count = target.experts.num_experts
        shapes = (count, entry.rank, target.held_inputs), (count, target.held_outputs, entry.rank)
        a, b = self._arena.factors(entry, *shapes)
        return out + entry.scale * exact_product(exact_product(x, a[expert]), b[expert])

    def add_to_latents(self, out: torch.Tensor, expansion: object, queries: torch.Tensor) -> None:
        for entry, rows, a, keys, _ in self._expansions(expansion):
            # Of head h: queries times B[h] are [rank], and times A they are in the latent space.
            inner = _head_products(queries[rows], keys.transpose(1, 2))
            _add_rows(out, rows, _head_products(inner, a.t().expand(keys.shape[0], -1, -1)), entry.scale)

    def add_to_values(self, out: torch.Tensor, expansion: object, latents: torch.Tensor) -> None:
        for entry, rows, a, _, values in self._expansions(expansion):
            inner = _head_products(latents[rows], a.expand(values.shape[0], -1, -1))
            _add_rows(out, rows, _head_products(inner, values), entry.scale)

    def _expansions(self, expansion: object) -> Iterator[tuple[FactorPlace, torch.Tensor, Any, Any, Any]]:
        """The adapters of an expansion: entry, token rows, first factor, second factor of keys and of values."""
        (target,) = self._arena.targets.of_module[id(expansion)]
        assert isinstance(target, ExpansionTarget)
        declared = target.expansion.declared
        for entry, rows in self._adapted(target):
            shapes = (entry.rank, declared.num_inputs), (declared.num_heads, -1, entry.rank)
            b_size = declared.num_outputs * entry.rank
            a = self._arena.factors(entry, shapes[0], (b_size,))[0]
            b = self._arena.tables.numbers[entry.b : entry.b + b_size].view(shapes[1])
            yield (entry, rows, a, *b.split((declared.key_dim, declared.value_dim), dim=1))


def _head_products(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [tokens, heads, inputs], weight [heads, outputs, inputs] -> [tokens, heads, outputs], each row alone."""
    out = torch.empty(*x.shape[:2], weight.shape[1], dtype=x.dtype, device=x.device)
    ops.head_products.variant(exact=True)(x.contiguous(), weight, out)
    return out


def _add_rows(out: torch.Tensor, rows: torch.Tensor, delta: torch.Tensor, scale: float) -> None:
    """out[rows] += scale * delta, and nothing else of `out` is written."""
    out[rows] += (delta * scale).to(out.dtype)
