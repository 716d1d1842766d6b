"""NgramDrafter: prompt lookup. It proposes the tokens that followed the last occurrence of the text's last tokens. It
runs on the device, over the tokens of the row, without a model or a cache.

It matches the longest suffix of the text, of max_n down to min_n tokens, that occurred before. Of several occurrences
it uses the latest.
"""

from __future__ import annotations

import torch

from outrider.config import SpeculativeConfig
from outrider.drafters.base import DraftBuild, Drafter, Drafts, HiddenReads, Step
from outrider.kernels import ops


class NgramDrafter(Drafter):
    name = "ngram"
    reads_hidden = HiddenReads.NOTHING

    def __init__(self, max_drafts: int, *, min_n: int = 2, max_n: int = 4,
                 never: torch.Tensor | None = None) -> None:
        """never: tokens that occur in prompts but never in text, such as image placeholders. Drafts end before them."""
        if not 1 <= min_n <= max_n:
            raise ValueError(f"prompt_lookup_min ({min_n}) must be from 1 to prompt_lookup_max ({max_n})")
        self.max_drafts, self.min_n, self.max_n, self._never = max_drafts, min_n, max_n, never

    def propose(self, step: Step) -> Drafts:
        view = step.batch.padded
        # The batch's own bound, plus the token each row has just got. A row in the middle of its prompt has more known
        # tokens than that, but gets no drafts.
        width = min(view.max_length.tokens + 1, step.tokens.shape[1])
        tokens, counts = ops.find_ngram(step.tokens, step.known, view.rows, width, step.num_wanted, self.min_n,
                                        self.max_n)
        if self._never is not None:
            is_text = (tokens[..., None] != self._never).all(dim=-1)
            counts = torch.minimum(counts, is_text.cumprod(dim=1).sum(dim=1))
        return Drafts(tokens, counts)


def ngram_drafter(config: SpeculativeConfig, build: DraftBuild) -> NgramDrafter:
    never = build.target.placeholders if build.target.sees else ()
    return NgramDrafter(config.num_speculative_tokens, min_n=config.prompt_lookup_min, max_n=config.prompt_lookup_max,
                        never=torch.tensor(never, device=build.device) if never else None)
