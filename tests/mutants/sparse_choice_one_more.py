"""A context of top_k + 1 tokens is attended whole: the indexer is not asked, and one position too many is read."""

from __future__ import annotations

import torch

from outrider.mixers.latent.latent_mixer import BoundLatentLayer, IndexedPositions, KeptChoice, WholeContext

NAME = "sparse choice: top_k + 1 tokens are taken whole"
TESTS = ["tests/drafters/test_f3.py::test_a_context_of_one_token_more_than_top_k_is_chosen_from"]


def apply() -> None:
    choose = BoundLatentLayer.choose

    def one_more(self: BoundLatentLayer, q: torch.Tensor, weights: torch.Tensor) -> None:
        assert isinstance(self.layer.attends_to, IndexedPositions)
        is_kept = isinstance(self.chosen.latest, KeptChoice)
        if not is_kept and self.plan.num_positions <= self.layer.attends_to.top_k + 1:
            self.chosen.latest = WholeContext()
        else:
            choose(self, q, weights)

    BoundLatentLayer.choose = one_more  # type: ignore[method-assign]
