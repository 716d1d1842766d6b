"""Which steps record auxiliary states: those whose drafters read them."""

from __future__ import annotations

from outrider.drafters.base import Drafter
from outrider.drafters.guard import DrafterGuards
from outrider.drafters.observer import DraftObserver


def with_aux_layers(kind: type[Drafter]) -> Drafter:
    drafter = kind()
    drafter.aux_layers = (1, 3)
    return drafter


class OnlyToDraft(Drafter):
    """Like the drafters of the package."""

    skip_reads_aux = False


def test_a_step_without_drafts_has_aux_states_only_for_an_observer_or_a_drafter_that_reads_them_then() -> None:
    for guards, without_drafts in ((DrafterGuards(with_aux_layers(OnlyToDraft)), ()),
                                   (DrafterGuards(with_aux_layers(Drafter)), (1, 3)),
                                   (DrafterGuards(with_aux_layers(OnlyToDraft), observers=[DraftObserver()]), (1, 3))):
        assert guards.aux_layers_for(0) == without_drafts
        assert guards.aux_layers_for(1) == guards.aux_layers_for(4) == (1, 3)
