"""The tables of LoRA adapters: where each adapter's factors are stored on the device, and which token rows use which
adapter.

`kernels/adapter_products.py` computes with these tables, which do not depend on files, requests or layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

NO_SLOT = -1  # of token rows without an adapter
ALIGNMENT = 64  # numbers: every factor begins at a multiple
NUM_PLACES = 3  # columns of `DeltaTables.places`: where the first and the second factor begin, and their rank
SEGMENT_ROWS = 16  # the most token rows of a segment: the fewest that tensor cores take


@dataclass(frozen=True)
class DeltaTables:
    """The factors of all adapters on the device. A rank of 0 means that the slot's adapter does not change the
    target."""

    # [numbers]: `a` [rank, inputs] and `b` [rank, outputs] of each slot and target. Experts have one pair behind the
    # other. The `a` of an embedding is [vocabulary, rank].
    numbers: Tensor
    places: Tensor  # [slots, targets, NUM_PLACES] int64
    scales: Tensor  # [slots, targets], float32 or float64
    bounds: Tensor  # [targets, 2] int64: the output features of a module that a target is
    max_rank: int  # the first projection of experts has up to twice as many if gate and up were adapted apart

    def first_factor(self, slot: int, target: int, num_inputs: int, expert: int = 0) -> Tensor | None:
        """Return the factor `a`; None if the slot's adapter does not change the target. Reads the device."""
        at, _, rank = self.places[slot, target].tolist()
        return self._factor(at, rank, num_inputs, expert) if rank else None

    def second_factor(self, slot: int, target: int, expert: int = 0) -> tuple[Tensor, float] | None:
        """Return the factor `b` and the scale of the product; None if the slot's adapter does not change the target.
        Reads the device."""
        _, at, rank = self.places[slot, target].tolist()
        begin, end = self.bounds[target].tolist()
        return (self._factor(at, rank, end - begin, expert), self.scales[slot, target].item()) if rank else None

    def factors(self, slot: int, target: int, num_inputs: int, expert: int = 0) -> tuple[Tensor, Tensor, float] | None:
        """Return the factors `a` and `b` and the scale of their product; None if the slot's adapter does not change the
        target. Reads the device."""
        a, second = self.first_factor(slot, target, num_inputs, expert), self.second_factor(slot, target, expert)
        return None if a is None or second is None else (a, *second)

    def _factor(self, at: int, rank: int, width: int, expert: int) -> Tensor:
        return self.numbers[at + expert * rank * width :][: rank * width].view(rank, -1)


class RowSlots(NamedTuple):
    """The adapter slot of each token row, and the token rows sorted by slot. Kernels process the sorted rows in
    segments: at most SEGMENT_ROWS consecutive rows with the same slot."""

    slots: Tensor  # [tokens] int64, NO_SLOT for rows without an adapter
    sorted_slots: Tensor  # [tokens] int64
    order: Tensor  # [tokens] int64: the token row of each sorted slot
    # [tokens, 3] int64: the first place of each segment in that order, the place behind its last, and its slot. Behind
    # the last segment: `tokens` twice and NO_SLOT.
    segments: Tensor
    num_segments: Tensor  # [1] int64

    @classmethod
    def from_slots(cls, slots: Tensor) -> RowSlots:
        sorted_slots, order = slots.sort(stable=True)
        segments = _segments(sorted_slots)
        num_segments = (segments[:, 0] < len(slots)).sum(dim=0, keepdim=True)
        return cls(slots, sorted_slots, order, segments, num_segments).settled()

    def settled(self) -> RowSlots:
        """Make these tensors safe for kernels that read them before they wait for the kernel before them (programmatic
        dependent launch). On a GPU this launches an ordinary kernel, which begins only when the tensors are in memory;
        the kernels that read early are launched behind it."""
        if self.slots.is_cuda:
            self.slots.new_zeros(1)
        return self

    @staticmethod
    def most_segments(num_rows: int, num_slots: int) -> int:
        """Return the most segments that this many token rows can form."""
        return min(num_rows, num_rows // SEGMENT_ROWS + num_slots + 1)


def _segments(sorted_slots: Tensor) -> Tensor:
    count = len(sorted_slots)
    place = torch.arange(count, device=sorted_slots.device)
    first_of_slot = torch.searchsorted(sorted_slots, sorted_slots)
    begins = (place - first_of_slot) % SEGMENT_ROWS == 0
    bounds = torch.full((count + 2,), count, device=place.device)  # the last one is for rows that begin no segment
    bounds[torch.where(begins, begins.cumsum(0) - 1, count + 1)] = place
    begin, end = bounds[:count], bounds[1 : count + 1]
    slot = torch.cat([sorted_slots, sorted_slots.new_full((1,), NO_SLOT)])[begin]
    return torch.stack([begin, end, slot], dim=1)


class TargetRange(NamedTuple):
    """The adapter targets of one linear layer: they have consecutive numbers, and `ends` says where the output features
    of each target end."""

    first: int
    ends: tuple[int, ...]

    def within(self, first: int, stop: int) -> range:
        """Return the targets that overlap the output features [first, stop)."""
        begins = (0, *self.ends[:-1])
        places = [place for place, (begin, end) in enumerate(zip(begins, self.ends, strict=True))
                  if begin < stop and end > first]
        return range(self.first + places[0], self.first + places[-1] + 1) if places else range(0)
