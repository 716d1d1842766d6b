"""RecurrentMixer: the part of a recurrent layer that carries a state from token to token. Also the base class of the
backends, which run mixers over a ragged batch.

Projections before a mixer and norms after it work on each token row alone and belong to the layer. A mixer does not
depend on rows, pages or drafts: the backend decides which states are stored."""

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
"""One recurrent layer in one step, as a model calls it. Takes conv_in [tokens, conv_dim] and gates [tokens, n] each,
returns [tokens, out_dim], with 0 for dead and padded token rows."""


class StepOutput(NamedTuple):
    """Result of advancing several rows by one token each."""

    y: torch.Tensor  # [rows, out_dim] in the model's dtype
    state: torch.Tensor  # [rows, *state_shape]
    tail: torch.Tensor  # [rows, conv_width - 1, conv_dim]


class ScanOutput(NamedTuple):
    """Result of advancing one request by many tokens."""

    y: torch.Tensor  # [tokens, out_dim] in the model's dtype
    state: torch.Tensor
    tail: torch.Tensor
    states_at: list[RecurrentState]  # the state after each boundary's number of tokens


@dataclass(frozen=True)
class MixerParams:
    """Parameters of a mixer that kernels need in addition to its cache spec. They are float32, with heads in the order
    of the state's shape."""

    kind: Literal["mamba2", "delta", "kda", "conv"]  # conv: a convolution without an activation, and nothing behind it
    conv_weight: torch.Tensor  # [conv_width, conv_dim]
    conv_bias: torch.Tensor | None
    dt_bias: torch.Tensor  # [heads]; [heads * k dim] of kda; unused by conv, as the rest
    decay: torch.Tensor  # [heads], below zero
    num_groups: int  # groups of heads that share B and C, or q and k
    skip: torch.Tensor | None = None  # [heads] D of Mamba-2, the weight of the input itself
    dt_limits: tuple[float, float] = (0.0, float("inf"))
    lower_bound: float | None = None  # of the logarithms of kda's decays
    max_beta: float = 1.0  # of delta: the largest strength of a correction


class RecurrentMixer(Protocol):
    """The recurrence of one layer, as two pure functions that read nothing on the host.

    conv_in and gates come straight from the projections, in the model's dtype and before any nonlinearity, so that
    keeping them in that dtype for a later fold loses nothing."""

    spec: RecurrentSpec

    def step(self, state: torch.Tensor, tail: torch.Tensor, conv_in: torch.Tensor, gates: Gates) -> StepOutput:
        """Compute one token of each of several rows: state [rows, *state_shape], tail [rows, conv_width - 1, conv_dim],
        conv_in [rows, conv_dim], gates [rows, n] each. The result of a row does not depend on other rows."""

    def scan(self, state: torch.Tensor, tail: torch.Tensor, conv_in: torch.Tensor, gates: Gates,
             boundaries: list[int], exact: bool = False) -> ScanOutput:
        """Compute many tokens of one request, in chunks: state [*state_shape], tail [conv_width - 1, conv_dim], conv_in
        [tokens, conv_dim], gates [tokens, n] each; boundaries do not decrease. However the tokens are split into
        calls, results are equal up to rounding; with `exact` they are those of `step`, bit for bit."""

    def kernel_params(self) -> MixerParams | None:
        """Return the parameters for kernels; None if no kernel serves this mixer."""


@dataclass(frozen=True)
class LayerRows:
    """State, tail and draft window of one recurrent layer, for every row."""

    state: torch.Tensor  # [ROWS, *state_shape]
    tail: torch.Tensor  # [ROWS, conv_width - 1, conv_dim]
    conv_in: torch.Tensor  # [ROWS, DRAFTS, conv_dim] window: inputs of the drafts of the row's last step
    gates: Gates  # [ROWS, DRAFTS, n] each


@dataclass(frozen=True)
class StepCounts:
    """The token counts of a batch for recurrent layers. From its query start on, a request has its known tokens, then
    its drafts."""

    rows: torch.Tensor  # [requests]
    query_starts: torch.Tensor  # [requests + 1]
    request_of: torch.Tensor  # [tokens]
    computed: torch.Tensor  # [requests] computed tokens when the step begins
    num_known: torch.Tensor  # [requests] live known tokens: all that were scheduled, or none
    num_drafts: torch.Tensor  # [requests] live drafts
    pending: torch.Tensor  # [requests] accepted drafts to fold
    query_lens: tuple[int, ...]  # scheduled tokens of each request
    known_lens: tuple[int, ...]  # scheduled known tokens of each request
    most_drafts: int
    most_pending: int
    targets: CheckpointTargets | None = None

    def passes(self, targets: CheckpointTargets) -> torch.Tensor:
        """Return [targets]: whether the state reaches the checkpoint's boundary in this step. The new state covers the
        boundary, and the old one did not."""
        request, boundary = targets.request, targets.boundary
        computed, num_known = self.computed[request], self.num_known[request]
        has_passed = (boundary > computed - self.pending[request]) & (boundary <= computed + num_known)
        return (num_known > 0) & has_passed


class RecurrentStep(ABC):
    """One step of a batch through a model's recurrent layers, layer by layer."""

    def __init__(self, layers: RecurrentBackend, counts: StepCounts) -> None:
        self.layers, self.counts = layers, counts
        self.written = None if counts.targets is None else counts.passes(counts.targets)  # [targets]

    def bind(self) -> dict[int, RecurrentLayer]:
        return {layer: partial(self.run, layer) for layer in self.layers.mixers}

    def keep_drafts(self, pending: torch.Tensor, num_accepted: torch.Tensor) -> None:
        """Store in `pending` [rows] how many accepted drafts [requests] of each row are not in its state yet. The row's
        next step folds them into the state. A request without tokens in this step keeps its count."""
        counts = self.counts
        pending.index_copy_(0, counts.rows, torch.where(counts.num_known > 0, num_accepted, counts.pending))

    @abstractmethod
    def run(self, layer: int, conv_in: torch.Tensor, gates: Gates) -> torch.Tensor:
        """Run one layer. conv_in [tokens, conv_dim], gates [tokens, n] each. Returns [tokens, out_dim]; 0 for dead and
        padded tokens."""


class NoRecurrentStep:
    """The step of a model without recurrent layers."""

    written = None

    def bind(self) -> dict[int, RecurrentLayer]:
        return {}

    def keep_drafts(self, pending: torch.Tensor, num_accepted: torch.Tensor) -> None:
        """Do nothing: without recurrent layers no drafts have to be folded."""


class RecurrentBackend(ABC):
    """A model's recurrent layers with their rows and checkpoint pages, and how steps advance them."""

    scan_from_tokens: int  # requests with at least this many known tokens are scanned, others go token by token
    finds_runs: bool  # whether the device alone finds the requests' token counts, and boundaries within them

    def __init__(self, mixers: Mapping[int, RecurrentMixer], rows: Mapping[int, LayerRows], pages: CheckpointPages, *,
                 exact: bool = False) -> None:
        self.mixers, self.rows, self.pages, self.exact = mixers, rows, pages, exact

    @abstractmethod
    def begin(self, counts: StepCounts) -> RecurrentStep: ...

    @abstractmethod
    def fold_ended(self, rows: torch.Tensor, computed: torch.Tensor, pending: torch.Tensor,
                   targets: CheckpointTargets) -> None:
        """Fold the pending drafts of ended rows [targets] into their states, up to the boundary. Stores nothing but the
        checkpoints."""
