"""DraftVocabulary: the tokens that a head can draft, chosen by how often they occur in the target's answers."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DraftVocabulary:
    """The tokens that a head can draft, by rising id. Token i of the head is token `ids[i]` of the target."""

    ids: torch.Tensor  # [draft vocabulary] int64, on the host
    target_size: int
    coverage: float  # share of the counted tokens that the head knows

    @classmethod
    def from_counts(cls, counts: torch.Tensor, size: int) -> DraftVocabulary:
        """The `size` most frequent tokens. Among equally frequent tokens the lower ids come first, so that a vocabulary
        does not depend on the machine."""
        target_size = len(counts)
        order = torch.argsort(counts, descending=True, stable=True)
        ids = order[: min(size, target_size)].sort().values
        total = int(counts.sum())
        return cls(ids, target_size, int(counts[ids].sum()) / total if total else 0.0)

    @property
    def offsets(self) -> torch.Tensor:
        """The tensor `d2t` of the exported file: the number to add to a token id of the head to get the target's token
        id."""
        return self.ids - torch.arange(len(self.ids))

    @property
    def is_known(self) -> torch.Tensor:
        """The tensor `t2d` of the exported file: [target vocabulary] bool, whether the head has the token."""
        known = torch.zeros(self.target_size, dtype=torch.bool)
        known[self.ids] = True
        return known
