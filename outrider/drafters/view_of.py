"""ViewOf: makes batches of rows that were just admitted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from outrider.core import Admission
from outrider.layers import GivenRows
from outrider.mixers import BatchView


class ViewOf(Protocol):
    """Makes batches of admitted rows."""

    def __call__(self, admissions: Sequence[Admission], /) -> BatchView:
        """Make the batch of the first token that each row computes, perhaps padded. It has the tokens' positions, page
        tables and lengths, but no cache slots."""

    def given_rows(self, admissions: Sequence[Admission], /) -> GivenRows | None:
        """Return the vectors that replace these tokens' embeddings; None if all tokens use their ids."""

    def components_before(self, admissions: Sequence[Admission], /) -> torch.Tensor | None:
        """Return the components [3, rows] of the positions before these tokens; None if they are equal, and equal to
        the positions."""
