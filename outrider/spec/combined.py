"""CombinedDrafter: several drafters in one. Each request gets the drafts of the first drafter that has any for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.cache.groups import LayerCache
from outrider.core import Admission, Limits
from outrider.layers import LayeredModule
from outrider.mixers import CachedLayers
from outrider.spec.base import Drafter, Drafts, Step


class CombinedDrafter(Drafter):
    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = list(drafters)
        self.name = "+".join(drafter.name for drafter in drafters)
        self.max_drafts = max(drafter.max_drafts for drafter in drafters)
        with_taps = [drafter for drafter in drafters if drafter.taps]
        if len(with_taps) > 1:
            raise ValueError(f"{self.name}: only one drafter of a combination may read hidden states")
        self.taps = with_taps[0].taps if with_taps else ()
        self.attention_layers = tuple(layer for drafter in drafters for layer in drafter.attention_layers)
        self.reads_hidden = max(drafter.reads_hidden for drafter in drafters)
        self.lookahead = max(drafter.lookahead for drafter in drafters)

    def cache_layers(self) -> list[LayerCache]:
        return [layer for drafter in self._drafters for layer in drafter.cache_layers()]

    def bind(self, cached: CachedLayers, limits: Limits, num_pages: int, device: torch.device) -> None:
        for drafter in self._drafters:
            drafter.bind(cached, limits, num_pages, device)

    def admit(self, admissions: list[Admission]) -> None:
        for drafter in self._drafters:
            drafter.admit(admissions)

    def reset(self) -> None:
        for drafter in self._drafters:
            drafter.reset()

    @property
    def has_slots_to_fill(self) -> bool:
        return any(drafter.has_slots_to_fill for drafter in self._drafters)

    def propose(self, step: Step) -> Drafts:
        first, *rest = [drafter.propose(step) for drafter in self._drafters]
        tokens, counts = first.tokens, first.counts
        for other in rest:
            tokens = torch.where((counts > 0)[:, None], tokens, other.tokens)
            counts = torch.where(counts > 0, counts, other.counts)
        return Drafts(tokens, counts)

    def skip(self, step: Step) -> None:
        for drafter in self._drafters:
            drafter.skip(step)

    def modules(self) -> list[LayeredModule]:
        return [module for drafter in self._drafters for module in drafter.modules()]

    def weight_bytes(self) -> int:
        return sum(drafter.weight_bytes() for drafter in self._drafters)

    def page_bytes(self, itemsize: int) -> int:
        return sum(drafter.page_bytes(itemsize) for drafter in self._drafters)
