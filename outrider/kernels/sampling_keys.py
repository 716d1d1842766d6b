"""SamplingKeys (the values that decide a draw) and CountTable (token counts), which the sampler passes to its
kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch


class SamplingKeys(NamedTuple):
    """The temperature, seed and sample index of each row, or of each logit row."""

    temperature: torch.Tensor  # float32; 0: greedy
    seed: torch.Tensor  # int64
    sample_index: torch.Tensor  # int64 or int32


class CountTable(NamedTuple):
    """Token counts of all rows, for penalties. Their memory is allocated when a request first asks for penalties, which
    may be after a step was captured; so kernels read the address of the counts from the device each time they run."""

    packed: torch.Tensor | None  # [rows, vocabulary] int32, see sampling_flags
    address: torch.Tensor  # [1] int64: of `packed`; 0 while there is none
    width: int  # tokens of the vocabulary
