"""auto_drafts: the chooser of draft counts for an engine whose step costs are measured."""

from __future__ import annotations

from outrider.core.costs import StepCosts
from outrider.speculation.individual_drafts import IndividualDrafts
from outrider.speculation.sized_drafts import SizedDrafts


def auto_drafts(k: int, costs: StepCosts, *, always_propose: bool) -> SizedDrafts | IndividualDrafts:
    """The chooser of draft counts with the most expected tokens per second; a count may be 0. `always_propose`: a
    proposal is too cheap to be worth saving in an uncaptured step. A captured step is so fast that a lookup takes 2% of
    it."""
    if costs.is_padded:
        return SizedDrafts(k, costs, misses_rests=not always_propose)
    return IndividualDrafts(k, costs, always_propose=always_propose)
