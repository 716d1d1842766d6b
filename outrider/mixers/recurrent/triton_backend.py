"""The Triton backend of recurrent layers over a ragged batch: a few launches a layer, and no copy of any state.

The torch backend is the specification. The tensors that kernels need of a batch are made once per step. This file
chooses the kernel for each kind of mixer. Tiles and grids are chosen elsewhere."""

from __future__ import annotations

import torch

from outrider.kernels.gpu.gated_delta.steps import delta_steps
from outrider.kernels.gpu.recurrent.inputs import ConvParams, GateParams, recurrent_inputs
from outrider.kernels.gpu.recurrent.mamba2 import mamba2_config, mamba2_steps
from outrider.kernels.gpu.recurrent.save_tails import save_tails
from outrider.kernels.gpu.recurrent.short_conv import conv_steps
from outrider.kernels.gpu.recurrent.step_tensors import LayerTensors, StepInputs, StepTensors
from outrider.kernels.recurrent import SHORT_RUN, CheckpointTargets
from outrider.mixers.recurrent.recurrent_mixer import Gates, MixerParams, RecurrentBackend, RecurrentStep, StepCounts


class TritonRecurrent(RecurrentBackend):
    scan_from_tokens = SHORT_RUN + 1
    finds_runs = True

    def begin(self, counts: StepCounts) -> TritonStep:
        return TritonStep(self, counts)

    def fold_ended(self, rows: torch.Tensor, computed: torch.Tensor, pending: torch.Tensor,
                   targets: CheckpointTargets) -> None:
        written = (targets.boundary > computed - pending) & (targets.boundary <= computed)
        none = torch.zeros(len(rows) + 1, dtype=torch.int64, device=rows.device)
        step = StepTensors.stack(rows, none, computed, none[:-1], none[:-1], pending, none[:0])
        kernels = LayerKernels(self, step, _only(targets, written), chunked=False, fold_only=True)
        for layer, own in self.rows.items():
            nothing = tuple(window.new_empty(0, window.shape[2]) for window in (own.conv_in, *own.gates))
            kernels.run(layer, nothing[0], nothing[1:])


class TritonStep(RecurrentStep):
    def __init__(self, layers: TritonRecurrent, counts: StepCounts) -> None:
        super().__init__(layers, counts)
        step = StepTensors.stack(counts.rows, counts.query_starts, counts.computed, counts.num_known, counts.num_drafts,
                                 counts.pending, counts.request_of)
        targets = None
        if counts.targets is not None and self.written is not None:
            targets = _only(counts.targets, self.written)
        chunked = not layers.exact and any(known >= layers.scan_from_tokens for known in counts.known_lens)
        self._kernels = LayerKernels(layers, step, targets, chunked=chunked)

    def run(self, layer: int, conv_in: torch.Tensor, gates: Gates) -> torch.Tensor:
        return self._kernels.run(layer, conv_in, gates)


class LayerKernels:
    """The kernels of all layers over one batch. fold_only: the rows have ended, so only checkpoints are written."""

    def __init__(self, layers: TritonRecurrent, step: StepTensors, targets: CheckpointTargets | None, *, chunked: bool,
                 fold_only: bool = False) -> None:
        self._layers, self._step, self._targets = layers, step, targets
        self._chunked, self._fold_only = chunked, fold_only

    def run(self, layer: int, conv_in: torch.Tensor, gates: Gates) -> torch.Tensor:
        rows, pages = self._layers.rows[layer], self._layers.pages
        params = self._layers.mixers[layer].kernel_params()
        assert params is not None, f"layer {layer} has no kernels"
        own = LayerTensors(rows.state, rows.tail, rows.conv_in, rows.gates, pages.pool, pages.starts[layer])
        conv = ConvParams(params.conv_weight, params.conv_bias)
        if params.kind == "conv":
            if self._targets is not None:
                save_tails(self._step, conv_in, own, self._targets)
            return conv_in if self._fold_only else conv_steps(self._step, conv_in, own, conv)
        gate = GateParams(params.kind, params.dt_bias, params.decay, params.dt_limits, params.lower_bound,
                          params.max_beta)
        inputs = recurrent_inputs(self._step, conv_in, gates, own, conv, gate, fold_only=self._fold_only)
        if self._targets is not None:
            save_tails(self._step, conv_in, own, self._targets)
        return self._advance(params, inputs, own)

    def _advance(self, params: MixerParams, inputs: StepInputs, own: LayerTensors) -> torch.Tensor:
        targets = self._targets
        if params.kind != "mamba2":
            return delta_steps(self._step, inputs, own, num_key_heads=params.num_groups, targets=targets,
                               chunked=self._chunked, fold_only=self._fold_only, per_channel=params.kind == "kda",
                               follows_inputs=not self._fold_only)
        assert params.skip is not None
        # With `exact`, one tile size serves any number of requests, so that bits do not depend on the number.
        config = mamba2_config(1, own.state.shape[2], chunked=False) if self._layers.exact else None
        return mamba2_steps(self._step, inputs, own, params.decay, params.skip, num_groups=params.num_groups,
                            targets=targets, chunked=self._chunked, fold_only=self._fold_only, config=config)


def _only(targets: CheckpointTargets, written: torch.Tensor) -> CheckpointTargets:
    """Return the targets, with boundary -1 for each checkpoint that this step does not write."""
    return targets._replace(boundary=torch.where(written, targets.boundary, -1))
