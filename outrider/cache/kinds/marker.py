"""Pages that keep nothing of their tokens, for models whose layers are all recurrent.

A state lies in its row, so no layer of such a model needs a page. Prefixes are still counted, shared and given up in
pages, and checkpoints of states are lists of pages.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.cache.kinds.base import PagedSpec
from outrider.cache.kinds.parts import Part


@dataclass(frozen=True)
class MarkerSpec(PagedSpec):
    """Nothing of any token."""

    @property
    def parts(self) -> tuple[Part, ...]:
        return ()
