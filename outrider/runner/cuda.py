"""CudaRunner: steps on a CUDA stream. The host queues a step and goes on; the result is read when it is asked for.

Decode steps replay graphs, everything else runs eagerly. Host data goes through pinned memory, so that queueing never
waits for the device.
"""

from __future__ import annotations

import time
from concurrent.futures import Future

import torch

from outrider.core import Limits, ScheduledBatch, StepResult
from outrider.kernels.buffers import to_device
from outrider.runner.graphs import StepGraphs
from outrider.runner.inputs import pack_host
from outrider.runner.results import read_result
from outrider.runner.runner import Padding
from outrider.runner.step import DeviceResult, DeviceStep


class PendingStep(Future[StepResult]):
    """A queued step. `result()` waits for its copy to the host and reads it."""

    def __init__(self, batch: ScheduledBatch, result: DeviceResult) -> None:
        super().__init__()
        self._batch = batch
        self._device_result = result
        self._counts = _to_pinned(result.counts)
        self._run = _to_pinned(result.run)
        self._queued = time.perf_counter()
        self._done = torch.cuda.Event()
        self._done.record()

    def result(self, timeout: float | None = None) -> StepResult:
        self._done.synchronize()
        late = self._device_result
        host = DeviceResult(self._counts, self._run, late.logprobs, late.prompt_logprobs, late.written)
        return read_result(self._batch, host, time.perf_counter() - self._queued)


def _to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


class CudaRunner:
    def __init__(self, step: DeviceStep, limits: Limits, *, use_graphs: bool = True,
                 padding: Padding | None = None) -> None:
        self.device_step = step
        self._padding = padding or Padding()
        self.graphs = StepGraphs(step, limits) if use_graphs else None
        self.num_replays = 0
        self.num_eager = 0

    @torch.inference_mode()
    def warm_up(self) -> int:
        return 0 if self.graphs is None else self.graphs.capture_ladder()

    @torch.inference_mode()
    def submit(self, batch: ScheduledBatch) -> Future[StepResult]:
        self.device_step.apply_host_writes(batch)
        key = None if self.graphs is None else self.graphs.key_for(batch)
        if key is None or self.graphs is None:
            self.num_eager += 1
            return PendingStep(batch, self.device_step.run(batch, self._padding.size_for(batch)))
        self.num_replays += 1
        captured = self.graphs.get(key)
        _, ints = pack_host(batch, self.graphs.padded_size(key))
        captured.ints.copy_(to_device(ints, torch.int64, captured.ints.device))
        captured.graph.replay()
        return PendingStep(batch, captured.result)

    def close(self) -> None:
        torch.cuda.synchronize()
