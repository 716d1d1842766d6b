"""SamplingKeys and CountTable, which the sampler passes to its kernels: values that decide a draw, and token counts."""

from __future__ import annotations

from typing import NamedTuple

import torch


class SamplingKeys(NamedTuple):
    """Sampling keys of each row, or of each logit row: temperature, seed, sample index."""

    temperature: torch.Tensor  # float32; 0: greedy
    seed: torch.Tensor  # int64
    sample_index: torch.Tensor  # int64 or int32


class CountTable(NamedTuple):
    """Token counts of all rows. Kernels find them by an address that they read when they run, because a captured step
    may be older than the counts, whose memory is taken when a request first asks for penalties."""

    packed: torch.Tensor | None  # [rows, vocabulary] int32, see sampling_flags
    address: torch.Tensor  # [1] int64: of `packed`; 0 while there is none
    width: int  # tokens of the vocabulary
