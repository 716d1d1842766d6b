"""ReportedLogprobs: the log-probabilities of sampled tokens or of prompt tokens, as the kernels return them."""

from __future__ import annotations

from typing import NamedTuple

import torch


class ReportedLogprobs(NamedTuple):
    """Log-probabilities of logit rows [L]: of one token of each row, and of the row's `num` likeliest tokens (ties by
    id).

    The log-probability of a logit x is (x - most) - norm. Both differences are rounded and nothing is fused, so that
    any code that has `most` and `norm` computes the same bits. The results of a logit row depend only on its own
    logits.
    """

    ids: torch.Tensor  # [L, 2 + num] int64: the token's rank, the token, the likeliest tokens
    values: torch.Tensor  # [L, 1 + num] of the token, of the likeliest tokens; NaN beside a NaN or an infinite logit
    most: torch.Tensor  # [L] the greatest logit
    norm: torch.Tensor  # [L] log of the sum of exp(logit - most)
