"""RecurrentMixer: the part of a recurrent layer that carries a state from token to token; and the protocol of the
backends that run mixers over a ragged batch.

What stands before a mixer (projections) and after it (norms) works on each token row alone and belongs to the layer. A
mixer knows nothing of rows, pages or drafts: the backend decides what is stored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, Protocol

import torch

from outrider.cache.kinds import RecurrentSpec
from outrider.kernels.recurrent import CheckpointTargets
from outrider.mixers.recurrent.checkpoint_pages import CheckpointPages, RecurrentState

Gates = tuple[torch.Tensor, ...]
RecurrentLayer = Callable[[torch.Tensor, Gates], torch.Tensor]
"""One recurrent layer in one step, as a model calls it: conv_in [tokens, conv_dim] and gates [tokens, n] each in,
[tokens, out_dim] out; 0 for dead and padded token rows."""


class Stepped(NamedTuple):
    """One more token of each row."""

    y: torch.Tensor  # [rows, out_dim] in the model's dtype
    state: torch.Tensor  # [rows, *state_shape]
    tail: torch.Tensor  # [rows, conv_width - 1, conv_dim]


class Scanned(NamedTuple):
    """Many more tokens of one request."""

    y: torch.Tensor  # [tokens, out_dim] in the model's dtype
    state: torch.Tensor
    tail: torch.Tensor
    states_at: list[RecurrentState]  # after as many tokens as each boundary says


@dataclass(frozen=True)
class MixerParams:
    """Parameters of a mixer that kernels need beside its spec. float32; heads as in the state's shape."""

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


@dataclass(frozen=True)
class LayerRows:
    """State, tail and draft window of one recurrent layer, for every row."""

    state: torch.Tensor  # [ROWS, *state_shape]
    tail: torch.Tensor  # [ROWS, conv_width - 1, conv_dim]
    conv_in: torch.Tensor  # [ROWS, DRAFTS, conv_dim] window: inputs of the drafts of the row's last step
    gates: Gates  # [ROWS, DRAFTS, n] each


@dataclass(frozen=True)
class StepCounts:
    """A batch as recurrent layers see it: a request's known tokens, then its drafts, from its query start on."""

    rows: torch.Tensor  # [requests]
    query_starts: torch.Tensor  # [requests + 1]
    request_of: torch.Tensor  # [tokens]
    computed: torch.Tensor  # [requests] when the step begins
    num_known: torch.Tensor  # [requests] live ones: all that were scheduled, or none
    num_drafts: torch.Tensor  # [requests] live ones
    pending: torch.Tensor  # [requests] accepted drafts to fold
    query_lens: tuple[int, ...]  # as scheduled
    known_lens: tuple[int, ...]  # as scheduled
    most_drafts: int
    most_pending: int
    targets: CheckpointTargets | None = None

    def passes(self, targets: CheckpointTargets) -> torch.Tensor:
        """[targets] whether the state to be stored has passed the boundary, and the one before had not."""
        request, boundary = targets.request, targets.boundary
        computed, num_known = self.computed[request], self.num_known[request]
        has_passed = (boundary > computed - self.pending[request]) & (boundary <= computed + num_known)
        return (num_known > 0) & has_passed


class RecurrentStep(ABC):
    """One step of a batch, layer by layer."""

    def __init__(self, layers: RecurrentBackend, counts: StepCounts) -> None:
        self.layers, self.counts = layers, counts
        self.written = None if counts.targets is None else counts.passes(counts.targets)  # [targets]

    def bind(self) -> dict[int, RecurrentLayer]:
        return {layer: partial(self.run, layer) for layer in self.layers.mixers}

    @abstractmethod
    def run(self, layer: int, conv_in: torch.Tensor, gates: Gates) -> torch.Tensor:
        """conv_in [tokens, conv_dim], gates [tokens, n] each. Returns [tokens, out_dim]; 0 for dead and padded ones."""


class RecurrentBackend(ABC):
    """A model's recurrent layers with their rows and checkpoint pages, and how steps advance them."""

    scan_from_tokens: int  # requests with at least so many known tokens are scanned, the others go token by token
    finds_runs: bool  # whether lengths of runs, and boundaries within them, are found on the device alone

    def __init__(self, mixers: Mapping[int, RecurrentMixer], rows: Mapping[int, LayerRows], pages: CheckpointPages, *,
                 exact: bool = False) -> None:
        self.mixers, self.rows, self.pages, self.exact = mixers, rows, pages, exact

    @abstractmethod
    def begin(self, counts: StepCounts) -> RecurrentStep: ...

    @abstractmethod
    def fold_ended(self, rows: torch.Tensor, computed: torch.Tensor, pending: torch.Tensor,
                   targets: CheckpointTargets) -> None:
        """Rows [targets] that take no further step: their pending drafts are applied up to the boundary. Stores
        nothing but the checkpoints."""
