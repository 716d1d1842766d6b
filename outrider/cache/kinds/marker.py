"""Pages that store nothing of their tokens, for models whose layers are all recurrent.

Recurrent states are stored by row, so no layer of these models needs pages. But prefix hits are counted in pages, and
checkpoints of states are lists of pages.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.cache.kinds.kind import PagedSpec
from outrider.cache.kinds.parts import Part


@dataclass(frozen=True)
class MarkerSpec(PagedSpec):
    """A spec that stores nothing of a token."""

    @property
    def parts(self) -> tuple[Part, ...]:
        return ()
