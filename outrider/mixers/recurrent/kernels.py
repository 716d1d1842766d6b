"""Recurrent layers over a ragged batch by Triton kernels: three launches a layer at most, and no copy of any state.

The torch path in `recurrent_backend.py` is the specification. What kernels need of a batch is made once per step; this
file knows which kernel goes with which kind of mixer, and nothing of tiles and grids.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from outrider.kernels.recurrent import SHORT_RUN
from outrider.kernels.triton.gated_delta import delta_config, delta_steps
from outrider.kernels.triton.mamba2 import mamba2_config, mamba2_steps
from outrider.kernels.triton.recurrent_inputs import ConvParams, GateParams, recurrent_inputs
from outrider.kernels.triton.recurrent_step import LayerTensors, SaveTargets, StepInputs, StepTensors
from outrider.kernels.triton.save_tails import save_tails
from outrider.mixers.recurrent.base import Gates, MixerParams, RecurrentMixer
from outrider.mixers.recurrent.checkpoint_pages import CheckpointPages

if TYPE_CHECKING:
    from outrider.mixers.recurrent.layers import LayerRows, StepCounts, Targets


class KernelStep:
    """A batch as the kernels take it. fold_only: its rows have ended; nothing but checkpoints is written."""

    def __init__(self, step: StepTensors, targets: BatchTargets | None, *, chunked: bool, exact: bool,
                 fold_only: bool = False) -> None:
        self._step, self._targets = step, targets
        self._chunked, self._exact, self._fold_only = chunked, exact, fold_only

    @classmethod
    def of(cls, counts: StepCounts, written: torch.Tensor | None, pages: CheckpointPages, *, exact: bool) -> KernelStep:
        """written [checkpoints]: those that this step is to write."""
        step = StepTensors.of(counts.rows, counts.query_starts, counts.computed, counts.num_known, counts.num_drafts,
                              counts.pending, counts.request_of)
        targets = None
        if counts.targets is not None:
            assert written is not None
            targets = BatchTargets(counts.targets, written, counts.rows.shape[0], pages)
        chunked = not exact and any(known > SHORT_RUN for known in counts.known_lens)
        return cls(step, targets, chunked=chunked, exact=exact)

    @classmethod
    def of_ended(cls, rows: torch.Tensor, computed: torch.Tensor, pending: torch.Tensor, targets: Targets,
                 written: torch.Tensor, pages: CheckpointPages) -> KernelStep:
        """Rows without tokens, with one target each."""
        none = torch.zeros(len(rows) + 1, dtype=torch.int64, device=rows.device)
        step = StepTensors.of(rows, none, computed, none[:-1], none[:-1], pending, none[:0])
        return cls(step, BatchTargets(targets, written, len(rows), pages), chunked=False, exact=False, fold_only=True)

    def __call__(self, layer: int, mixer: RecurrentMixer, rows: LayerRows, conv_in: torch.Tensor,
                 gates: Gates) -> torch.Tensor:
        """conv_in [tokens, conv_dim], gates [tokens, n] each. Returns [tokens, out_dim]; 0 for dead and padded ones."""
        params = mixer.kernel_params()
        assert params is not None, f"layer {layer} has no kernels"
        own = LayerTensors(rows.state, rows.tail, rows.conv_in, rows.gates)
        conv = ConvParams(params.conv_weight, params.conv_bias)
        gate = GateParams(params.kind, params.dt_bias, params.decay, params.dt_limits)
        inputs = recurrent_inputs(self._step, conv_in, gates, own, conv, gate, fold_only=self._fold_only)
        targets = None if self._targets is None else self._targets.of(layer)
        if targets is not None:
            save_tails(self._step, conv_in, own, targets)
        return self._advance(params, inputs, own, targets)

    def _advance(self, params: MixerParams, inputs: StepInputs, own: LayerTensors,
                 targets: SaveTargets | None) -> torch.Tensor:
        # The same tile for any number of requests where bits must not depend on them.
        heads, dim = own.state.shape[1:3]
        if params.kind == "delta":
            config = delta_config(1, heads, dim, own.state.device, chunked=False) if self._exact else None
            return delta_steps(self._step, inputs, own, num_key_heads=params.num_groups, targets=targets,
                               chunked=self._chunked, fold_only=self._fold_only, config=config)
        assert params.skip is not None
        config = mamba2_config(1, dim, chunked=False) if self._exact else None
        return mamba2_steps(self._step, inputs, own, params.decay, params.skip, num_groups=params.num_groups,
                            targets=targets, chunked=self._chunked, fold_only=self._fold_only, config=config)


class BatchTargets:
    """Checkpoints of a batch by request; `of(layer)` adds where a layer's part of them lies."""

    def __init__(self, targets: Targets, written: torch.Tensor, num_requests: int, pages: CheckpointPages) -> None:
        self._pages = pages
        request, boundary, listed = targets.request, torch.where(written, targets.boundary, -1), targets.pages
        if targets.order is not None:
            request, boundary, listed = request[targets.order], boundary[targets.order], listed[targets.order]
        index = torch.arange(num_requests + 1, device=request.device)
        self._starts = torch.searchsorted(request, index)
        self._boundary, self._listed = boundary, listed

    def of(self, layer: int) -> SaveTargets:
        return SaveTargets(self._starts, self._boundary, self._listed, self._pages.pool, self._pages.starts[layer])
