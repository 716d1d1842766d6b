"""What adapters add to the products of a model, in plain torch: out += scale * (x A') B', by token row.

A token row is computed alone and in one order of additions. Rows without an adapter are not written. The tables say
where the factors lie; knows nothing of files, requests or layers.

The functions with `_by` take the product of token rows with a matrix, which must give a row the same bits alone and
among others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.kernels import moe

NO_SLOT = -1  # of token rows without an adapter
ALIGNMENT = 64  # numbers: every factor begins at a multiple
NUM_PLACES = 3  # columns of `AdapterTables.places`: where the first and the second factor begin, and their rank


@dataclass(frozen=True)
class AdapterTables:
    """The factors of all adapters on the device. A rank of 0 says that the slot's adapter does not change a target."""

    # [numbers]: `a` [rank, inputs] and `b` [rank, outputs] of each slot and target. Experts have one pair behind the
    # other. The `a` of an embedding is [vocabulary, rank].
    numbers: Tensor
    places: Tensor  # [slots, targets, NUM_PLACES] int64
    scales: Tensor  # [slots, targets], float32 or float64
    bounds: Tensor  # [targets, 2] int64: the output features of a module that a target is
    max_rank: int

    def factors(self, slot: int, target: int, num_inputs: int, expert: int = 0) -> tuple[Tensor, Tensor, float] | None:
        """`a`, `b` and the scale of their product; None if the slot's adapter does not change the target. Reads the
        device."""
        a, b, rank = self.places[slot, target].tolist()
        if not rank:
            return None
        begin, end = self.bounds[target].tolist()
        sizes = rank * num_inputs, rank * (end - begin)
        held = (self.numbers[at + expert * size :][:size] for at, size in zip((a, b), sizes, strict=True))
        return *(factor.view(rank, -1) for factor in held), self.scales[slot, target].item()


class RowSlots(NamedTuple):
    """The slots of token rows, and the rows in the order of their slots, which kernels go through."""

    slots: Tensor  # [tokens] int64, NO_SLOT for rows without an adapter
    sorted_slots: Tensor  # [tokens] int64
    order: Tensor  # [tokens] int64: the token row of each sorted slot

    @classmethod
    def from_slots(cls, slots: Tensor) -> RowSlots:
        sorted_slots, order = slots.sort(stable=True)
        if slots.is_cuda:
            # Kernels read the order before they wait for their predecessors. This launch, which is an ordinary one,
            # lies between the sort and the first of them, and begins when the sort's results are in memory.
            slots.new_zeros(1)
        return cls(slots, sorted_slots, order)


class TargetRange(NamedTuple):
    """The targets of one linear layer, which lie one behind the other, and where the output features of each end."""

    first: int
    ends: tuple[int, ...]

    def within(self, first: int, stop: int) -> range:
        """The targets that have some of the output features [first, stop)."""
        begins = (0, *self.ends[:-1])
        places = [place for place, (begin, end) in enumerate(zip(begins, self.ends, strict=True))
                  if begin < stop and end > first]  # fmt: skip
        return range(self.first + places[0], self.first + places[-1] + 1) if places else range(0)


Product = Callable[[Tensor, Tensor], Tensor]  # token rows [tokens, inputs] and a weight [outputs, inputs]


def row_products(x: Tensor, weight: Tensor) -> Tensor:
    """The products of token rows, each computed alone."""
    return torch.cat([F.linear(row.clone(), weight) for row in x.split(1)])


def add_adapters(x: Tensor, out: Tensor, first: int, rows: RowSlots, tables: AdapterTables,
                 targets: TargetRange) -> None:
    """Add to out [tokens, features], the output features of a linear layer from `first` on for x [tokens, inputs], what
    the adapter in each token row's slot adds."""
    add_by(row_products, x, out, first, rows, tables, targets)


def add_by(product: Product, x: Tensor, out: Tensor, first: int, rows: RowSlots, tables: AdapterTables,
           targets: TargetRange) -> None:
    for slot, token_rows in _rows_of_slots(rows.slots):
        for target in targets.within(first, first + out.shape[1]):
            if (found := tables.factors(slot, target, x.shape[1])) is None:
                continue
            a, b, scale = found
            begin, end = tables.bounds[target].tolist()
            low, high = max(begin, first), min(end, first + out.shape[1])
            delta = _delta(product, x[token_rows], a, b[:, low - begin : high - begin])
            out[token_rows, low - first : high - first] += (delta * scale).to(out.dtype)


def add_adapters_gated(x: Tensor, out: Tensor, activation: str, rows: RowSlots, tables: AdapterTables,
                       targets: TargetRange) -> Tensor:
    """The gated activation of out [tokens, 2 x width], the output features of a linear layer for x [tokens, inputs], to
    which is added what the adapter in each token row's slot adds: [tokens, width]. `out` may be written."""
    add_adapters(x, out, 0, rows, tables, targets)
    return moe.activate(out, activation)


def add_adapter_embeddings(out: Tensor, tokens: Tensor, gain: float, rows: RowSlots, tables: AdapterTables,
                           target: int) -> None:
    """Add to out [tokens, hidden], the embeddings of these ids, `gain` times what the adapter in each token row's slot
    adds."""
    add_embeddings_by(row_products, out, tokens, gain, rows, tables, target)


def add_embeddings_by(product: Product, out: Tensor, tokens: Tensor, gain: float, rows: RowSlots,
                      tables: AdapterTables, target: int) -> None:
    for slot, token_rows in _rows_of_slots(rows.slots):
        a, b, rank = tables.places[slot, target].tolist()
        if rank:
            looked_up = a + tokens[token_rows, None] * rank + torch.arange(rank, device=tokens.device)
            factor = tables.numbers[b : b + rank * out.shape[1]].view(rank, -1)
            delta = product(tables.numbers[looked_up], factor.t().contiguous())
            out[token_rows] += (delta * (tables.scales[slot, target].item() * gain)).to(out.dtype)


class HeadColumns(NamedTuple):
    """The output features of a latent expansion that are keys, or values: each head has both."""

    per_head: int  # output features of a head
    first: int
    width: int  # how many they are


def add_head_adapters(x: Tensor, out: Tensor, rows: RowSlots, tables: AdapterTables, target: int, columns: HeadColumns,
                      into_latents: bool) -> None:
    """Add what the adapters of a latent expansion add, whose `b` has these columns in each head. into_latents: x
    [tokens, heads, keys] goes backwards through b and a to out [tokens, heads, latent]; otherwise x [tokens, heads,
    latent] through a and b to out [tokens, heads, values]."""
    add_heads_by(row_products, x, out, rows, tables, target, columns, into_latents)


def add_heads_by(product: Product, x: Tensor, out: Tensor, rows: RowSlots, tables: AdapterTables, target: int,
                 columns: HeadColumns, into_latents: bool) -> None:
    num_latents = (out if into_latents else x).shape[2]
    for slot, token_rows in _rows_of_slots(rows.slots):
        if (found := tables.factors(slot, target, num_latents)) is None:
            continue
        a, b, scale = found
        own = b.view(len(b), -1, columns.per_head)[:, :, columns.first : columns.first + columns.width]
        for head in range(x.shape[1]):
            pair = (own[:, head], a) if into_latents else (a, own[:, head])
            delta = _delta(product, x[token_rows, head], *pair)
            out[token_rows, head] += (delta * scale).to(out.dtype)


class ExpertTargets(NamedTuple):
    """The targets of experts: both projections."""

    first: int
    down: int


def mix_adapted_experts(out: Tensor, x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor,
                        activation: str, added: Tensor | None, rows: RowSlots, tables: AdapterTables,
                        targets: ExpertTargets) -> None:
    """Replace in out [tokens, hidden], the weighted sums of experts plus `added`, those of token rows whose adapter
    changes the experts. The rest is as in `kernels.moe.experts`; what an adapter adds to the first projection is added
    before the activation."""
    mix_experts_by(row_products, out, x, ids, weights, gate_up, down, activation, added, rows, tables, targets)


def mix_experts_by(product: Product, out: Tensor, x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor,
                   down: Tensor, activation: str, added: Tensor | None, rows: RowSlots, tables: AdapterTables,
                   targets: ExpertTargets) -> None:
    def project(x: Tensor, weight: Tensor, slot: int, target: int, expert: int) -> Tensor:
        made = product(x, weight[expert])
        if (found := tables.factors(slot, target, x.shape[1], expert)) is None:
            return made
        a, b, scale = found
        return made + scale * _delta(product, x, a, b)

    for slot, token_rows in _rows_of_slots(rows.slots):
        if not tables.places[slot, list(targets), 2].any():
            continue
        for row in token_rows.tolist():
            total = torch.zeros(down.shape[1], dtype=weights.dtype, device=x.device)
            for expert, weight in zip(ids[row].tolist(), weights[row], strict=True):
                inner = moe.activate(project(x[row : row + 1], gate_up, slot, targets.first, expert), activation)
                total += weight * project(inner.to(x.dtype), down, slot, targets.down, expert)[0]
            own = total.to(out.dtype)
            out[row] = own if added is None else own + added[row]


def _delta(product: Product, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """(x A') B, of token rows [tokens, inputs] and factors [rank, inputs] and [rank, outputs]."""
    return product(product(x.contiguous(), a.contiguous()), b.t().contiguous())


def _rows_of_slots(slots: Tensor) -> list[tuple[int, Tensor]]:
    """The slots that token rows have, each with its token rows. Reads the device."""
    return [(slot, (slots == slot).nonzero().flatten()) for slot in slots.unique().tolist() if slot != NO_SLOT]
