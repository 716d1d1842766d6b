"""The cache spec of pages without keys and values, for models whose layers are all recurrent.

Recurrent states are stored by row, so no layer of these models reads or writes pages. The cache manager still needs a
group of pages for them, because it counts prefix hits in pages and stores checkpoints of states in pages.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.cache.kinds.kind import PagedSpec
from outrider.cache.kinds.parts import Part


@dataclass(frozen=True)
class MarkerSpec(PagedSpec):
    """The spec of pages that store zero bytes for each token."""

    @property
    def parts(self) -> tuple[Part, ...]:
        return ()
