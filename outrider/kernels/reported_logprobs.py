"""ReportedLogprobs: the log-probabilities that kernels report, of sampled tokens and of prompt tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch


class ReportedLogprobs(NamedTuple):
    """Log-probabilities of logit rows [L]: of one token each, and of its row's `num` likeliest tokens, ties by id.

    The log-probability of a logit x is (x - most) - norm: both differences are rounded, and nothing is fused, so that
    whoever has these two numbers gets the same bits. They depend on nothing but the logits of their own row."""

    ids: torch.Tensor  # [L, 2 + num] int64: the token's rank, the token, the likeliest tokens
    values: torch.Tensor  # [L, 1 + num] of the token, of the likeliest tokens; NaN beside a NaN or an infinite logit
    most: torch.Tensor  # [L] the greatest logit
    norm: torch.Tensor  # [L] log of the sum of exp(logit - most)
