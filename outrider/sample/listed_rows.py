"""ListedRows: the logit rows whose requests gave a list, such as logit biases, and the place of each row's list.

All logit rows of a request share its list, so a list is kept once, however many tokens of a prompt a step computes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from outrider.kernels.buffers import to_device

MOST_PAIRS = 1 << 20  # pairs of a logit row and an entry that are worked on at a time


@dataclass(frozen=True)
class ListedRows:
    """The logit rows of a step that have a list. The entries of all lists lie one after another."""

    rows: tuple[int, ...]  # logit rows, ascending
    lens: tuple[int, ...]  # the number of entries of each row's list
    fields: torch.Tensor  # [3, R] int64: logit row, first entry of its list, number of entries

    @classmethod
    def from_lists(cls, lists: Sequence[tuple[range, int]], device: torch.device) -> ListedRows:
        """Make the rows from lists: a pair for each list, in the order in which the entries of the lists are stored:
        the logit rows that use the list, and the number of its entries."""
        rows, firsts, lens, first = list[int](), list[int](), list[int](), 0
        for own, num in lists:
            rows += own
            firsts += [first] * len(own)
            lens += [num] * len(own)
            first += num
        return cls(tuple(rows), tuple(lens), to_device([rows, firsts, lens], torch.int64, device))

    def between(self, start: int, stop: int) -> ListedRows:
        """Return the logit rows start to stop, with row `start` renumbered as 0."""
        at = slice(bisect_left(self.rows, start), bisect_left(self.rows, stop))
        row, first, num = self.fields[:, at]
        return ListedRows(tuple(own - start for own in self.rows[at]), self.lens[at],
                          torch.stack([row - start, first, num]))

    def pairs(self, width: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield every pair of a logit row and an entry of its list, as two tensors [P]. The pairs come in pieces, so
        that scratch memory is bounded. width: the elements that the caller computes for each pair, besides the two
        indices."""
        start, size = 0, 0
        for stop, num in enumerate(self.lens):
            if size and (size + num) * (1 + width) > MOST_PAIRS:
                yield self._pairs(slice(start, stop), size)
                start, size = stop, 0
            size += num
        if size:
            yield self._pairs(slice(start, len(self.lens)), size)

    def _pairs(self, at: slice, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        row, first, num = self.fields[:, at]
        which = torch.arange(len(row), device=row.device).repeat_interleave(num, output_size=size)
        before = num.cumsum(0) - num
        return row[which], torch.arange(size, device=row.device) + (first - before)[which]
