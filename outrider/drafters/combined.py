"""CombinedDrafter: presents several drafters as one at start-up, with the layers, hidden states and memory of all.

A step calls its drafters one by one (`drafters/guard.py`), so that a fault of one does not affect the others. Each
request gets the drafts of the drafter from which most are expected to be accepted (`drafters/choice.py`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.cache.groups import LayerCache
from outrider.core import Limits
from outrider.drafters.base import Drafter
from outrider.layers import LayeredModule
from outrider.mixers import CachedLayers


class CombinedDrafter(Drafter):
    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self.drafters = list(drafters)
        self.name = "+".join(drafter.name for drafter in drafters)
        self.max_drafts = max(drafter.max_drafts for drafter in drafters)
        with_aux_layers = [drafter for drafter in drafters if drafter.aux_layers]
        if len(with_aux_layers) > 1:
            raise ValueError(f"{self.name}: only one of several drafters may read hidden states: leave one of them out "
                             "of speculative_config's list of methods")
        self.aux_layers = with_aux_layers[0].aux_layers if with_aux_layers else ()
        self.attention_layers = tuple(layer for drafter in drafters for layer in drafter.attention_layers)
        self.reads_hidden = max(drafter.reads_hidden for drafter in drafters)
        self.lookahead = max(drafter.lookahead for drafter in drafters)

    def cache_layers(self) -> list[LayerCache]:
        return [layer for drafter in self.drafters for layer in drafter.cache_layers()]

    def bind(self, cached: CachedLayers, limits: Limits, device: torch.device) -> None:
        for drafter in self.drafters:
            drafter.bind(cached, limits, device)

    def modules(self) -> list[LayeredModule]:
        return [module for drafter in self.drafters for module in drafter.modules()]

    def weight_bytes(self) -> int:
        return sum(drafter.weight_bytes() for drafter in self.drafters)
