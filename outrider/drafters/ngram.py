"""NgramDrafter: prompt lookup. It proposes the tokens that followed the last occurrence of the text's last tokens. It
runs on the device, over the tokens of the row, without a model or a cache.

It matches the longest suffix of the text, of max_n down to min_n tokens, that occurred before. Of several occurrences
it uses the latest.
"""

from __future__ import annotations

from outrider.config import SpeculativeConfig
from outrider.drafters.base import DraftBuild, Drafter, Drafts, HiddenReads, Step
from outrider.kernels import ops


class NgramDrafter(Drafter):
    name = "ngram"
    reads_hidden = HiddenReads.NOTHING

    def __init__(self, max_drafts: int, *, min_n: int = 2, max_n: int = 4) -> None:
        if not 1 <= min_n <= max_n:
            raise ValueError(f"prompt_lookup_min ({min_n}) must be from 1 to prompt_lookup_max ({max_n})")
        self.max_drafts, self.min_n, self.max_n = max_drafts, min_n, max_n

    def propose(self, step: Step) -> Drafts:
        view = step.batch.padded
        # The batch's own bound, plus the token each row has just got. A row in the middle of its prompt has more known
        # tokens than that, but gets no drafts.
        width = min(view.max_length.tokens + 1, step.tokens.shape[1])
        return Drafts(*ops.find_ngram(step.tokens, step.known, view.rows, width, step.num_wanted, self.min_n,
                                      self.max_n))


def ngram_drafter(config: SpeculativeConfig, build: DraftBuild) -> NgramDrafter:
    return NgramDrafter(config.num_speculative_tokens, min_n=config.prompt_lookup_min, max_n=config.prompt_lookup_max)
