"""Chooses how many drafts each request gets in the next step, from the results and times of steps, and calls the
drafters that run on the host.

The scheduler calls the interface `core.speculation.Speculation`, which `StepDrafts` implements. No torch here, and no
drafter by name.
"""

from typing import TYPE_CHECKING

from outrider.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from outrider.speculation.choosers import auto_drafts
    from outrider.speculation.draft_counts import DraftCounts, FixedDrafts
    from outrider.speculation.host_drafts import HostDrafter, HostDrafts
    from outrider.speculation.host_step_drafts import StepDraftsWithHost
    from outrider.speculation.step_drafts import StepDrafts
else:
    __getattr__ = lazy_exports(__name__)

__all__ = [
    "DraftCounts",
    "FixedDrafts",
    "HostDrafter",
    "HostDrafts",
    "StepDrafts",
    "StepDraftsWithHost",
    "auto_drafts",
]
