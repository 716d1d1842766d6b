"""Pages that keep nothing of their tokens, for models whose layers are all recurrent.

States lie in rows, so no layer of these models needs pages. But prefixes are counted, shared and dropped in pages, and
checkpoints of states are lists of pages.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.cache.kinds.kind import PagedSpec
from outrider.cache.kinds.parts import Part


@dataclass(frozen=True)
class MarkerSpec(PagedSpec):
    """Keeps no part of a token."""

    @property
    def parts(self) -> tuple[Part, ...]:
        return ()
