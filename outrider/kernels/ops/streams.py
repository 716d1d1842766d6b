"""Entries of the table of operations: residual streams."""

from __future__ import annotations

import torch

from outrider.kernels import streams
from outrider.kernels.ops.operation import UP_TO_FLOAT32, Exactness, Operation, triton_kernel


def _streams_of(x: torch.Tensor | None, weights: torch.Tensor | None, streams: torch.Tensor,
                *_: object) -> torch.Tensor:
    return streams


join_streams = Operation(
    streams.join_streams,
    triton_kernel("outrider.kernels.gpu.elements.streams:join_streams", UP_TO_FLOAT32),
    subject=_streams_of, exact=Exactness.ROW_BY_ROW,
)
stream_gates = Operation(
    streams.stream_gates,
    triton_kernel("outrider.kernels.gpu.elements.streams:stream_gates", UP_TO_FLOAT32),
    exact="outrider.kernels.ops.exact:stream_gates",
)
mix_streams = Operation(
    streams.mix_streams,
    triton_kernel("outrider.kernels.gpu.elements.streams:mix_streams", UP_TO_FLOAT32),
    exact="outrider.kernels.ops.exact:mix_streams",
)
gate_values = Operation(streams.gate_values, exact="outrider.kernels.ops.exact:gate_values")
add_silu = Operation(streams.add_silu, exact="outrider.kernels.ops.exact:add_silu")
read_streams = Operation(
    streams.read_streams,
    triton_kernel("outrider.kernels.gpu.elements.hyper_streams:read_streams", UP_TO_FLOAT32),
    exact="outrider.kernels.ops.exact:read_streams",
)
write_streams = Operation(
    streams.write_streams,
    triton_kernel("outrider.kernels.gpu.elements.hyper_streams:write_streams", UP_TO_FLOAT32),
    exact=Exactness.ROW_BY_ROW,
)
