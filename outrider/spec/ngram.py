"""n-gram lookup: what followed the last time the text ended like this? On the device, over the row's own tokens.

The longest suffix of max_n down to min_n tokens that occurred before wins, the latest occurrence of it if there are
several. No model, no cache.
"""

from __future__ import annotations

import torch

from outrider.spec.base import Drafter, Drafts, Step


class NgramDrafter(Drafter):
    name = "ngram"

    def __init__(self, max_drafts: int, *, min_n: int = 2, max_n: int = 4) -> None:
        if not 1 <= min_n <= max_n:
            raise ValueError(f"prompt_lookup_min must be in [1, prompt_lookup_max], got {min_n} and {max_n}")
        self.max_drafts, self.min_n, self.max_n = max_drafts, min_n, max_n

    def propose(self, step: Step) -> Drafts:
        view = step.batch.padded
        # The batch's own bound, and the token each row has just got.
        width = min(view.max_length.tokens + 1, step.tokens.shape[1])
        history = step.tokens[view.rows, :width]
        # A row in the middle of its prompt knows more than the bound, and does not guess.
        known = step.known[view.rows].clamp_max(width)
        return lookup(history, known, step.most, self.min_n, self.max_n)


def lookup(history: torch.Tensor, known: torch.Tensor, most: int, min_n: int, max_n: int) -> Drafts:
    """history [requests, width], of which row r's first known[r] are meant."""
    position = torch.arange(history.shape[1], device=history.device)
    last = (known - 1)[:, None]
    matched = torch.zeros_like(history)  # tokens up to here that equal the last ones of the row, at most max_n
    still = position < last  # an occurrence must end before the end
    for back in range(max_n):
        wanted = history.gather(1, (last - back).clamp_min(0))
        shifted = history.roll(back, dims=1) if back else history
        still = still & (shifted == wanted) & (position >= back) & (last >= back)
        matched = matched + still
    score = torch.where(matched >= min_n, matched * history.shape[1] + position, -1)
    best, at = score.max(dim=1)
    follow = at[:, None] + 1 + torch.arange(most, device=history.device)
    tokens = history.gather(1, follow.clamp_max(history.shape[1] - 1))
    counts = torch.where(best >= 0, (known - at - 1).clamp(0, most), 0)
    return Drafts(tokens, counts)
