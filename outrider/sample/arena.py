"""Arena: allocates ranges of integers in one buffer of fixed size, first fit. It only tracks which ranges are taken and
holds no tensor.

The buffer never moves, so that captured graphs may hold its address. The caller must handle a list that does not fit.
"""

from __future__ import annotations


class Arena:
    def __init__(self, size: int) -> None:
        self.size = size
        self._free = [(0, size)]  # (start, end), ascending; no two of them touch
        self._owned: dict[int, int] = {}  # start -> end

    @property
    def num_free(self) -> int:
        return sum(end - start for start, end in self._free)

    def allocate(self, size: int) -> int | None:
        """Allocate `size` integers and return the index of the first; None if no gap is that long."""
        assert size > 0, "an empty list needs no place"
        for index, (start, end) in enumerate(self._free):
            if end - start >= size:
                self._free[index : index + 1] = [(start + size, end)] if end - start > size else []
                self._owned[start] = start + size
                return start
        return None

    def free(self, start: int) -> None:
        end = self._owned.pop(start)
        merged: list[tuple[int, int]] = []
        for gap in sorted([*self._free, (start, end)]):
            if merged and merged[-1][1] == gap[0]:
                gap = (merged.pop()[0], gap[1])
            merged.append(gap)
        self._free = merged
