"""What adapters add to the product of a linear layer, in plain torch: out += scale * (x A') B', by token row.

A token row is computed alone and in one order of additions. Rows without an adapter are not written. The tables say
where the factors lie; knows nothing of files, requests or layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

NO_SLOT = -1  # of token rows without an adapter
ALIGNMENT = 64  # numbers: every factor begins at a multiple
NUM_PLACES = 3  # columns of `AdapterTables.places`: where the first and the second factor begin, and their rank


@dataclass(frozen=True)
class AdapterTables:
    """The factors of all adapters on the device. A rank of 0 says that the slot's adapter does not change a target."""

    numbers: Tensor  # [numbers]: `a` [rank, inputs] and `b` [rank, outputs] of each slot and target
    places: Tensor  # [slots, targets, NUM_PLACES] int64
    scales: Tensor  # [slots, targets], float32 or float64
    bounds: Tensor  # [targets, 2] int64: the output features of a linear layer that a target is
    max_rank: int


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
    """As `add_adapters`, by a product that gives a token row the same bits alone and among others."""
    for slot in rows.slots.unique().tolist():
        if slot == NO_SLOT:
            continue
        token_rows = (rows.slots == slot).nonzero().flatten()
        own = x[token_rows]
        for target in targets.within(first, first + out.shape[1]):
            a, b, rank = tables.places[slot, target].tolist()
            if not rank:
                continue
            begin, end = tables.bounds[target].tolist()
            low, high = max(begin, first), min(end, first + out.shape[1])
            inner = product(own, tables.numbers[a : a + rank * x.shape[1]].view(rank, -1))
            factor = tables.numbers[b : b + rank * (end - begin)].view(rank, -1)[:, low - begin : high - begin]
            delta = product(inner, factor.t().contiguous()) * tables.scales[slot, target].item()
            out[token_rows, low - first : high - first] += delta.to(out.dtype)
