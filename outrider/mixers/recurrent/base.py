"""RecurrentMixer: the part of a recurrent layer that carries a state from token to token.

What stands before it (projections) and after it (norms) works on each token row alone and belongs to the layer. A
mixer knows nothing of rows, pages or drafts: whoever keeps the states decides what is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch

from outrider.cache.kinds import RecurrentSpec

Gates = tuple[torch.Tensor, ...]
RecurrentLayer = Callable[[torch.Tensor, Gates], torch.Tensor]
"""One recurrent layer in one step, as a model calls it: conv_in [tokens, conv_dim] and gates [tokens, n] each in,
[tokens, out_dim] out; 0 for dead and padded token rows."""


class Stepped(NamedTuple):
    """One more token of each row."""

    y: torch.Tensor  # [rows, out_dim] in the model's dtype
    state: torch.Tensor  # [rows, *state_shape]
    tail: torch.Tensor  # [rows, conv_width - 1, conv_dim]


class RecurrentState(NamedTuple):
    """All that a request's past is to one layer."""

    state: torch.Tensor  # [*state_shape], float32, or float64 in a float64 model
    tail: torch.Tensor  # [conv_width - 1, conv_dim] the last inputs before the convolution, oldest first


class Scanned(NamedTuple):
    """Many more tokens of one request."""

    y: torch.Tensor  # [tokens, out_dim] in the model's dtype
    state: torch.Tensor
    tail: torch.Tensor
    states_at: list[RecurrentState]  # after as many tokens as each boundary says


@dataclass(frozen=True)
class MixerParams:
    """What kernels need of a mixer beside its spec. float32; heads as in the state's shape."""

    kind: Literal["mamba2", "delta"]
    conv_weight: torch.Tensor  # [conv_width, conv_dim]
    conv_bias: torch.Tensor | None
    dt_bias: torch.Tensor  # [heads]
    decay: torch.Tensor  # [heads], below zero
    num_groups: int  # of heads that share B and C, or q and k
    skip: torch.Tensor | None = None  # [heads] D of Mamba-2
    dt_limits: tuple[float, float] = (0.0, float("inf"))


class RecurrentMixer(Protocol):
    """conv_in and gates are as the projections leave them, in the model's dtype and before any nonlinearity: kept in
    that dtype for a later fold, they lose nothing. Both functions are pure and read nothing on the host.
    """

    spec: RecurrentSpec

    def step(self, state: torch.Tensor, tail: torch.Tensor, conv_in: torch.Tensor, gates: Gates) -> Stepped:
        """One token for each of several rows: state [rows, *state_shape], tail [rows, conv_width - 1, conv_dim],
        conv_in [rows, conv_dim], gates [rows, n] each. The recurrence itself; no row's result depends on another's.
        """
        ...

    def scan(self, state: torch.Tensor, tail: torch.Tensor, conv_in: torch.Tensor, gates: Gates,
             boundaries: list[int], exact: bool = False) -> Scanned:
        """Tokens of one request, in chunks: state [*state_shape], tail [conv_width - 1, conv_dim], conv_in
        [tokens, conv_dim], gates [tokens, n] each; boundaries do not decrease. However the tokens are split into
        calls, results are equal up to rounding; with `exact` they are those of `step`, bit for bit.
        """
        ...

    def kernel_params(self) -> MixerParams | None:
        """None if no kernel serves this mixer."""
        ...
