"""Rotary position embedding: tables for the lengths an engine serves, and the rotation itself (half-split).

This file has the scalings that depend only on the position; `models.config` reads their parameters from a config.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch


@dataclass(frozen=True)
class RopeParams:
    """A rope as a config describes it. Fields that a `kind` does not use stay at their defaults."""

    kind: str
    theta: float
    rotary_dim: int  # leading dimensions of a head that rotate
    original_len: int  # positions the unscaled rope was trained for
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    divisors: tuple[float, ...] = ()  # longrope: of each frequency, within the original length
    long_divisors: tuple[float, ...] = ()  # likewise, in tables that reach beyond it

    @property
    def reach(self) -> int:
        """Return the number of positions (context length) that the rope's scaling was made for."""
        return int(self.original_len * self.factor) if self.kind == "yarn" else 0


TABLE_BLOCK = 2048  # angles of a table that are computed together: of more, torch has several threads compute them


class Angles:
    """The rotary embedding of one step's token rows. Kernels read positions and table; `rotate` reads the gathered
    values."""

    def __init__(self, positions: torch.Tensor, rotary: Rotary) -> None:
        self.positions, self.table, self._rotary = positions, rotary.table, rotary

    def of_rows(self, token_rows: torch.Tensor) -> Angles:
        """Return the rotary embedding of some of the token rows."""
        return Angles(self.positions[token_rows], self._rotary)

    @property
    def halves(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cos columns and the sin columns of the table: [positions, rotary_dim / 2] each."""
        return self._rotary.halves

    @cached_property
    def cos_sin(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin of the token rows, [tokens, 1, rotary_dim] each; sin is negated in the first half. They
        are gathered once and shared by the layers."""
        cos, sin = self.table[self.positions].unsqueeze(1).chunk(2, dim=-1)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


class Rotary:
    """Tables of cos and sin for positions 0 to max_len - 1, in float32 (float64 in a float64 model)."""

    def __init__(self, params: RopeParams, *, max_len: int, dtype: torch.dtype, device: torch.device) -> None:
        if params.kind == "dynamic" and max_len > params.original_len:
            raise ValueError(
                f"rope_type='dynamic' is not supported beyond its original length ({params.original_len} positions, "
                f"max_len is {max_len}): its frequencies depend on the length of the whole sequence, so keys already "
                f"in the cache would be wrong for a longer one; set max_len to at most {params.original_len}"
            )
        if params.kind == "longrope" and max_len > params.original_len:
            # By the length that is served and not by a text's own: keys in the cache would change as the text grows.
            params = replace(params, divisors=params.long_divisors)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        if device.type == "meta":  # the table's shape is wanted, and a damaged config may ask for terabytes
            self.table = torch.empty(max_len, params.rotary_dim, dtype=wide, device=device)
            return
        frequencies, magnitude = FREQUENCIES[params.kind](params, wide)
        self.table = rope_table(frequencies, max_len).mul_(magnitude).to(device)

    def at(self, positions: torch.Tensor) -> Angles:
        """Return the rotary embedding at these positions [tokens] int64. A step calls this once, and the layers share
        the result."""
        return Angles(positions, self)

    def of_step(self, positions: torch.Tensor, components: torch.Tensor | None) -> Angles:
        """Return the rotary embedding of a step's token rows. components: their positions [3, tokens], if the rope has
        several components and these differ."""
        return self.at(positions)

    @cached_property
    def halves(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cos columns and the sin columns of the table: see `Angles.halves` for the shapes."""
        cos, sin = self.table.chunk(2, dim=1)
        return cos, sin


class StillRotary(Rotary):
    """A rope that rotates by zero, for layers without a rope in a model with ropes in other layers. Kernels that rotate
    and write keys in one launch then serve these layers too."""

    def __init__(self, head_dim: int, *, max_len: int, dtype: torch.dtype, device: torch.device) -> None:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.table = torch.zeros(max_len, head_dim, dtype=wide, device=device)
        self.table[:, : head_dim // 2] = 1


class Unrotated(Rotary):
    """A rope that rotates nothing, for layers that take a rope but were trained without positions. Every position reads
    the one row of its table, with cos 1 and sin 0."""

    def __init__(self, rotary_dim: int, *, dtype: torch.dtype, device: torch.device) -> None:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.table = torch.zeros(1, rotary_dim, dtype=wide, device=device)
        self.table[:, : rotary_dim // 2] = 1

    def at(self, positions: torch.Tensor) -> Angles:
        return Angles(torch.zeros_like(positions), self)


def rope_table(frequencies: torch.Tensor, max_len: int) -> torch.Tensor:
    """Compute the table [max_len, cos | sin], in one tensor so that a step gathers once. It is computed in blocks of
    one size, because a library may compute the last elements of a tensor with other code. So the values at a position
    do not depend on max_len. A block is too small for several threads, which would mostly wait for each other."""
    num = frequencies.numel()
    if not num:  # nothing rotates: no positions to compute
        return torch.empty(max_len, 0, dtype=frequencies.dtype)
    rows = 1 << max(0, (TABLE_BLOCK // num).bit_length() - 1)
    table = torch.empty(-(-max_len // rows), rows, 2 * num, dtype=frequencies.dtype)
    positions = torch.arange(table.shape[0] * rows, dtype=frequencies.dtype).view(-1, rows, 1)
    for part, block in zip(table, positions, strict=True):
        angles = block * frequencies
        part[:, :num], part[:, num:] = angles.cos(), angles.sin()
    return table.flatten(0, 1)[:max_len]


def rotate(x: torch.Tensor, angles: Angles) -> torch.Tensor:
    """Rotate the leading rotary_dim dimensions of each head and keep the others. x: [tokens, heads, head_dim]."""
    cos, sin = angles.cos_sin
    rotary_dim = cos.shape[-1]
    if rotary_dim < x.shape[-1]:
        return torch.cat((rotate(x[..., :rotary_dim], angles), x[..., rotary_dim:]), dim=-1)
    turned = x.roll(rotary_dim // 2, dims=-1)
    if x.is_cpu:  # fused, a library rounds once or twice, by the element's place in the tensor
        return (x * cos).add_(turned * sin).to(x.dtype)
    return torch.addcmul(x * cos, turned, sin).to(x.dtype)


# Frequencies are computed in the order of operations that models were trained with: a frequency that differs in its
# last bit turns a token at position 1000 by 6e-5 more or less, which float32 shows.


def _powers(params: RopeParams, dtype: torch.dtype) -> torch.Tensor:
    exponents = torch.arange(0, params.rotary_dim, 2, dtype=dtype) / params.rotary_dim
    return params.theta**exponents


def _unscaled(params: RopeParams, dtype: torch.dtype) -> torch.Tensor:
    return 1.0 / _powers(params, dtype)


def _default(params: RopeParams, dtype: torch.dtype) -> tuple[torch.Tensor, float]:
    return _unscaled(params, dtype), 1.0


def _linear(params: RopeParams, dtype: torch.dtype) -> tuple[torch.Tensor, float]:
    return _unscaled(params, dtype) / params.factor, 1.0


def _llama3(params: RopeParams, dtype: torch.dtype) -> tuple[torch.Tensor, float]:
    """Return frequencies by Llama 3's scaling: low frequencies are divided by `factor`, high frequencies are kept, and
    those in between are blended."""
    frequencies = _unscaled(params, dtype)
    turns = params.original_len * frequencies / (2 * math.pi)  # full turns within the original length
    between = params.high_freq_factor - params.low_freq_factor
    blend = (turns - params.low_freq_factor) / between if between else (turns >= params.low_freq_factor).to(dtype)
    return torch.lerp(frequencies / params.factor, frequencies, blend.clamp(0, 1)), 1.0


def _yarn(params: RopeParams, dtype: torch.dtype) -> tuple[torch.Tensor, float]:
    """Return frequencies by YaRN's scaling: like Llama 3's, but blended over the dimension index, and with a magnitude
    that keeps attention as sharp over longer texts."""
    low, high = _yarn_dim(params, params.beta_fast), _yarn_dim(params, params.beta_slow)
    if params.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, params.rotary_dim - 1)
    if low == high:
        high += 0.001
    powers = _powers(params, dtype)
    kept = 1 - ((torch.arange(params.rotary_dim // 2, dtype=dtype) - low) / (high - low)).clamp(0, 1)
    return 1.0 / (params.factor * powers) * (1 - kept) + 1.0 / powers * kept, _yarn_magnitude(params)


def _longrope(params: RopeParams, dtype: torch.dtype) -> tuple[torch.Tensor, float]:
    """Return frequencies by LongRoPE's scaling: a divisor for each frequency, and a magnitude that keeps attention as
    sharp."""
    magnitude = params.attention_factor
    if magnitude is None:
        longer = math.log(params.factor) / math.log(params.original_len) if params.factor > 1 else 0.0
        magnitude = math.sqrt(1 + longer)
    return 1.0 / (torch.tensor(params.divisors, dtype=dtype) * _powers(params, dtype)), magnitude


def _yarn_dim(params: RopeParams, turns: float) -> float:
    """Return the index (not an integer) of the dimension that makes `turns` full turns within the original length."""
    return (
        params.rotary_dim * math.log(params.original_len / (turns * 2 * math.pi)) / (2 * math.log(params.theta))
    )


def _yarn_magnitude(params: RopeParams) -> float:
    if params.attention_factor is not None:
        return params.attention_factor
    if params.mscale and params.mscale_all_dim:
        return yarn_mscale(params.factor, params.mscale) / yarn_mscale(params.factor, params.mscale_all_dim)
    return yarn_mscale(params.factor, 1.0)


def yarn_mscale(factor: float, weight: float) -> float:
    """Return the magnitude that keeps attention as sharp in a context that is `factor` times longer."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


# Frequencies [rotary_dim / 2] and the magnitude of cos and sin, by kind. Dynamic is served within its original length
# only, where it equals default.
FREQUENCIES: dict[str, Callable[[RopeParams, torch.dtype], tuple[torch.Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "dynamic": _default,
    "longrope": _longrope,
}
