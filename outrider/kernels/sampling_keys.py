"""SamplingKeys: the values that decide a draw beside the logits. The sampler passes them to its kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch


class SamplingKeys(NamedTuple):
    """Sampling keys of each row, or of each logit row: temperature, seed, sample index."""

    temperature: torch.Tensor  # float32; 0: greedy
    seed: torch.Tensor  # int64
    sample_index: torch.Tensor  # int64 or int32
