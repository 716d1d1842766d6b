"""Attention without positions whose queries grow with their place in a text, so that it stays as sharp over long ones.

A query at position p is multiplied by 1 + strength * log(1 + (p + 1) // interval).
"""

from __future__ import annotations

import math
from functools import cached_property

import torch

from outrider.layers.attention import SelfAttention
from outrider.layers.context import StepContext
from outrider.layers.rotary import Angles, Unrotated


class TemperedRotary(Unrotated):
    """A rope that turns nothing, with the factors of queries at positions 0 to max_len - 1."""

    def __init__(self, head_dim: int, *, interval: int, strength: float, max_len: int, dtype: torch.dtype,
                 device: torch.device) -> None:
        super().__init__(head_dim, dtype=dtype, device=device)
        self.interval = interval
        # One factor for each run of positions, computed one by one: its bits do not depend on the table's length.
        count = max_len // interval + 1
        if device.type == "meta":  # a damaged config may ask for terabytes
            self.factors = torch.empty(count, dtype=self.table.dtype, device=device)
            return
        factors = [1 + strength * math.log1p(run) for run in range(count)]
        self.factors = torch.tensor(factors, dtype=self.table.dtype, device=device)

    def at(self, positions: torch.Tensor) -> TemperedAngles:
        return TemperedAngles(positions, self)


class TemperedAngles(Angles):
    """The rotation of token rows, which is none, and the factors of their queries."""

    def __init__(self, positions: torch.Tensor, rotary: TemperedRotary) -> None:
        super().__init__(torch.zeros_like(positions), rotary)
        self._text_positions, self._tempered = positions, rotary

    def of_rows(self, token_rows: torch.Tensor) -> TemperedAngles:
        return TemperedAngles(self._text_positions[token_rows], self._tempered)

    @cached_property
    def query_factors(self) -> torch.Tensor:
        """[tokens, 1]. Gathered once, the layers share it."""
        runs = (self._text_positions + 1) // self._tempered.interval
        return self._tempered.factors[runs].unsqueeze(1)


class TemperedAttention(SelfAttention):
    """Attention whose layer has a `TemperedRotary`."""

    def mix(self, qkv: torch.Tensor, angles: Angles, context: StepContext) -> torch.Tensor:
        assert isinstance(angles, TemperedAngles)
        qkv[:, : self.layer.num_heads * self.layer.head_dim].mul_(angles.query_factors)
        return super().mix(qkv, angles, context)
