"""Attention that scales queries up with their position, so that attention stays as sharp over long texts.

A query is multiplied by 1 + strength * log(1 + run), where `run` counts the complete intervals of `interval` positions
before it.
"""

from __future__ import annotations

import math
from functools import cached_property

import torch

from outrider.layers.attention import SelfAttention
from outrider.layers.context import StepContext
from outrider.layers.rotary import Angles, Rotary


class TemperedRotary(Rotary):
    """A rope that also has the scale factors of queries at positions 0 to max_len - 1."""

    def __init__(self, rope: Rotary, *, interval: int, strength: float, counts_itself: bool, max_len: int) -> None:
        """counts_itself: the run of position p is (p + 1) // interval, otherwise p // interval."""
        self.rope, self.table = rope, rope.table
        self.interval, self.shift = interval, int(counts_itself)
        # One factor for each run, computed one by one: its bits do not depend on the table's length.
        count = max_len // interval + 1
        dtype, device = rope.table.dtype, rope.table.device
        if device.type == "meta":  # a damaged config may ask for terabytes
            self.factors = torch.empty(count, dtype=dtype, device=device)
            return
        factors = [1 + strength * math.log1p(run) for run in range(count)]
        self.factors = torch.tensor(factors, dtype=dtype, device=device)

    def at(self, positions: torch.Tensor) -> TemperedAngles:
        return TemperedAngles(positions, self)


class TemperedAngles(Angles):
    """The rotary embedding of token rows, and the scale factors of their queries."""

    def __init__(self, positions: torch.Tensor, rotary: TemperedRotary) -> None:
        super().__init__(rotary.rope.at(positions).positions, rotary.rope)
        self._text_positions, self._tempered = positions, rotary

    def of_rows(self, token_rows: torch.Tensor) -> TemperedAngles:
        return TemperedAngles(self._text_positions[token_rows], self._tempered)

    @cached_property
    def query_factors(self) -> torch.Tensor:
        """Return the factors of the token rows' queries: [tokens, 1]. They are gathered once and shared by the
        layers."""
        runs = (self._text_positions + self._tempered.shift) // self._tempered.interval
        return self._tempered.factors[runs].unsqueeze(1)


class TemperedAttention(SelfAttention):
    """Attention for layers with a `TemperedRotary`: it multiplies queries by their factors."""

    def mix(self, qkv: torch.Tensor, angles: Angles, context: StepContext) -> torch.Tensor:
        assert isinstance(angles, TemperedAngles)
        qkv[:, : self.layer.num_heads * self.layer.head_dim].mul_(angles.query_factors)
        return super().mix(qkv, angles, context)
