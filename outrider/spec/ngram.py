"""n-gram lookup: what followed the last time the text ended like this? On the device, over the row's own tokens.

The longest suffix of max_n down to min_n tokens that occurred before wins, the latest occurrence of it if there are
several. No model, no cache.
"""

from __future__ import annotations

from outrider.kernels import ops
from outrider.spec.base import Drafter, Drafts, Step


class NgramDrafter(Drafter):
    name = "ngram"

    def __init__(self, max_drafts: int, *, min_n: int = 2, max_n: int = 4) -> None:
        if not 1 <= min_n <= max_n:
            raise ValueError(f"prompt_lookup_min must be in [1, prompt_lookup_max], got {min_n} and {max_n}")
        self.max_drafts, self.min_n, self.max_n = max_drafts, min_n, max_n

    def propose(self, step: Step) -> Drafts:
        view = step.batch.padded
        # The batch's own bound, and the token each row has just got. A row in the middle of its prompt knows more than
        # that, and does not guess.
        width = min(view.max_length.tokens + 1, step.tokens.shape[1])
        return Drafts(*ops.find_ngram(step.tokens, step.known, view.rows, width, step.most, self.min_n, self.max_n))
