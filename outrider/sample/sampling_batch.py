"""The sampler's input for a step: its logit rows, and the tokens before each of them.

These are views of device state, valid for one step. Logit row l chooses the token at `position[l]` of its request,
which follows the known tokens and the first `draft_index[l]` drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LogitRows:
    """The logit rows of a step. A request's logit rows are contiguous; a request whose prompt is still being computed
    has none."""

    request: torch.Tensor  # [L] int64: index in the batch
    row: torch.Tensor  # [L] int64
    draft_index: torch.Tensor  # [L] int64: this logit row comes after so many drafts
    position: torch.Tensor  # [L] int64: index in the sequence of the token being chosen

    def __post_init__(self) -> None:
        lengths = {len(self.request), len(self.row), len(self.draft_index), len(self.position)}
        assert len(lengths) == 1, f"logit rows disagree: {lengths}"

    def __len__(self) -> int:
        return int(self.row.shape[0])


@dataclass(frozen=True)
class History:
    """The tokens before each logit row. The sequence of row r is tokens[r, :known[r]], then drafts[r]. Later elements
    of `tokens` are stale and never read as history."""

    tokens: torch.Tensor  # [ROWS, LENGTH] int64
    known: torch.Tensor  # [ROWS] int64
    drafts: torch.Tensor  # [ROWS, DRAFTS] int64
    bound: int  # no row of this batch has more known tokens

    def at(self, row: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Return the tokens of rows [n] at positions [n, m]. Positions outside the sequence return arbitrary tokens,
        which the caller must mask."""
        inside = position.clamp(0, self.tokens.shape[1] - 1)
        known = self.tokens[row[:, None], inside]
        if self.drafts.shape[1] == 0:
            return known
        index = position - self.known[row][:, None]
        drafted = self.drafts[row[:, None], index.clamp(0, self.drafts.shape[1] - 1)]
        return torch.where(index < 0, known, drafted)
