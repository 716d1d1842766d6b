"""SyntheticAcceptance, for benchmarks: drafts are accepted at chosen rates, independent of the model.

The real drafter and the real check run; only the decision to accept is replaced, so the text is not the model's."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.kernels.drafting import DraftVerdicts
from outrider.kernels.ops import NotExact, Operation, triton_kernel
from outrider.sample.philox import random_words
from outrider.sample.sampling_batch import LogitRows

ROW_STEP = 0x9E3779B97F4A7  # between the keys of rows with one seed


class SyntheticAcceptance:
    """Accepts draft j of row r with probability rates[r % len(rates)][j], if the drafts before it were accepted.
    Further drafts have the last rate of the list."""

    def __init__(self, rates: Sequence[Sequence[float]], max_drafts: int, device: torch.device) -> None:
        # [kinds of rows, max drafts] the rate times 2^32, made outside of any capture.
        thresholds = [[round(own[min(j, len(own) - 1)] * 2**32) for j in range(max_drafts)] for own in rates]
        self._thresholds = torch.tensor(thresholds, dtype=torch.int64, device=device)

    def apply(self, sampled: torch.Tensor, logit_rows: LogitRows, drafts: torch.Tensor, seed: torch.Tensor,
              vocab: int) -> torch.Tensor:
        """Return the sampled tokens [logit rows], changed so that exactly the drafts chosen by the rates are accepted:
        equal to those drafts, and different from all others. `seed` is by row."""
        if drafts.shape[1] == 0:
            return sampled
        places = (logit_rows.request, logit_rows.row, logit_rows.draft_index, logit_rows.position)
        verdicts = DraftVerdicts(*places, drafts)
        return accept_at_rates(sampled, verdicts, seed, self._thresholds, vocab=vocab, row_step=ROW_STEP)


def _accept_at_rates(sampled: torch.Tensor, verdicts: DraftVerdicts, seed: torch.Tensor, thresholds: torch.Tensor, *,
                     vocab: int, row_step: int) -> torch.Tensor:
    """Return sampled [logit rows], replaced by the draft where 32 random bits are below the draft's threshold, and made
    different from it elsewhere. thresholds [kinds, drafts]: row r uses the thresholds r % kinds."""
    request, row, draft_index, position, drafts = verdicts
    index = draft_index.clamp_max(drafts.shape[1] - 1)
    draft = drafts[request, index]
    # Keyed by position, so that a run repeats; requests without a seed of their own share one.
    key = seed[row] + row * row_step
    words = random_words(key, torch.zeros_like(key), position, None, 1).squeeze(1)
    other = torch.where(sampled == draft, (draft + 1) % vocab, sampled)
    chosen = torch.where(words < thresholds[row % thresholds.shape[0], index], draft, other)
    return torch.where(draft_index < drafts.shape[1], chosen, sampled)


accept_at_rates = Operation(
    _accept_at_rates, triton_kernel("outrider.kernels.gpu.drafts.synthetic:accept_at_rates"), name="accept_at_rates",
    exact=NotExact("synthetic acceptance changes the text on purpose"),
)
