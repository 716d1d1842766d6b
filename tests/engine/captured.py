"""Steps of a rig run as captured ones do: padded to a graph's size, with nothing of the host but its integers. On the
CPU nothing is captured; a graph replays just this."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch

from outrider.core import ScheduledBatch, StepForm, StepResult, Uncaptured
from outrider.kernels.buffers import to_device
from outrider.runner.batch import PackedBatch, pack_captured
from outrider.runner.graphs.keys import GraphKey, GraphKeys
from outrider.runner.results import read_result, with_asked_logprobs
from tests.engine.harness import Rig


class AsCaptured:
    """With `form` split the host has its turn between the halves of every step, also of those that no graph serves.
    `stands_in`: in the first and every second step a graph of start-up stands in for the batch's own."""

    def __init__(self, rig: Rig, *, takes_prompts: bool = True, takes_parameters: bool = False,
                 form: StepForm = StepForm.WHOLE, stands_in: bool = False, takes_adapters: bool = False) -> None:
        self._rig, self._form = rig, form
        self.keys = GraphKeys(rig.engine.limits, rig.step.drafting, takes_prompts=takes_prompts,
                              takes_parameters=takes_parameters, whole_len=rig.step.cached.whole_len,
                              takes_shared=rig.step.pool.layout.has_full_attention,
                              deltas=rig.step.deltas, captures_deltas=takes_adapters)
        self._at_start = list(self.keys.at_start()) if stands_in else []
        self.wider: list[GraphKey] = []  # that stood in
        self.met: list[GraphKey] = []
        self.reasons: Counter[Uncaptured] = Counter()
        self.turns: list[int] = []  # steps in which the host had its turn
        rig.step.host_turn = lambda batch: self.turns.append(batch.step)  # type: ignore[method-assign]
        rig.runner._run = self.run  # type: ignore[method-assign]

    @torch.inference_mode()
    def run(self, batch: ScheduledBatch, packed: PackedBatch) -> StepResult:
        step, batch = self._rig.step, replace(batch, mode=batch.mode._replace(form=self._form))
        self._rig._poison(batch)
        step.apply_host_writes(batch)
        key = self.keys.key_for(batch, step.state)
        if isinstance(key, Uncaptured):
            self.reasons[key] += 1
            return read_result(batch, step.run(batch, packed), 0.0, key)
        if not len(self.met) % 2 and (wider := self.keys.wider(key, self._at_start)) is not None:
            if wider != key:
                self.wider.append(wider)
            key = wider
        self.met.append(key)
        shape, plan = self.keys.shape(key), self.keys.plan(key)
        ints = to_device(pack_captured(batch, shape), torch.int64, step.state.device)
        half = step.forward_half(shape, ints, plan)
        if key.form is StepForm.SPLIT:
            step.host_turn(batch)
        result = step.finish_half(half, plan)
        if result.logprobs is not None:
            result = with_asked_logprobs(result, batch, step.state.params)
        return read_result(batch, result, 0.0)
