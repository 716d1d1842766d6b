"""F3: the indexer packs requests of few token rows into a rectangle, which takes the front of the shared buffer."""

from __future__ import annotations

import torch

from outrider.kernels import ops
from outrider.mixers.latent.latent_mixer import BoundLatentLayer, ListedPositions

NAME = "f3: indexer rows packed by request"
TESTS = ["tests/drafters/test_f3.py"]


def apply() -> None:
    choose = BoundLatentLayer.choose

    def packed(self: BoundLatentLayer, q: torch.Tensor, weights: torch.Tensor) -> None:
        choose(self, q, weights)
        latest, contexts = self.chosen.latest, self.plan.contexts
        if not isinstance(latest, ListedPositions):
            return
        counts = torch.bincount(contexts.request_of).tolist()
        width = max((count for count in counts if count <= 4), default=0)
        rows, first = [], 0
        for count in counts:
            if 0 < count <= 4:
                rows += [first + min(step, count - 1) for step in range(width)]
            first += count
        index = torch.tensor(rows[: len(q)], dtype=torch.int64)
        own = contexts._replace(request_of=contexts.request_of[index], first=contexts.first[index],
                                stop=contexts.stop[index])
        # The queries are packed, the weights beside them are not.
        ops.choose_positions(q[index], weights[: len(index)], self.cache["index_key"], own,
                             latest.positions[: len(index)])

    BoundLatentLayer.choose = packed  # type: ignore[method-assign]
