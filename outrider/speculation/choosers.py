"""auto_drafts: makes the chooser of draft counts for an engine whose step costs are measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.core.costs import StepCosts
from outrider.core.lazy_exports import LateModule

if TYPE_CHECKING:
    from outrider.speculation import individual_drafts, sized_drafts
    from outrider.speculation.individual_drafts import IndividualDrafts
    from outrider.speculation.sized_drafts import SizedDrafts
else:
    individual_drafts = LateModule("outrider.speculation.individual_drafts")
    sized_drafts = LateModule("outrider.speculation.sized_drafts")


def auto_drafts(k: int, costs: StepCosts, *, always_propose: bool) -> SizedDrafts | IndividualDrafts:
    """Make the chooser of draft counts that maximises the expected tokens per second; a count may be 0.
    `always_propose`: whether proposals cost so little that uncaptured steps always make them. Captured steps do not:
    they are so fast that an n-gram lookup takes 2% of their time."""
    if costs.is_padded:
        return sized_drafts.SizedDrafts(k, costs, misses_rests=not always_propose)
    return individual_drafts.IndividualDrafts(k, costs, always_propose=always_propose)
