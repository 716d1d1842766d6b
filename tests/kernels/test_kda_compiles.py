"""The kernels of KDA layers, at the sizes of Kimi-Linear, and of short convolutions compile for an H200 that is not
there: the interpreter takes what the compiler may refuse. This file runs as a program, in which Triton does not
interpret."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")

from tests.kernels.compiled import compiling, found_without_interpreter

HEADS, DIM, WINDOW, REQUESTS, TOKENS = 32, 128, 3, 2, 40


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests compile them")
def test_the_compiler_takes_every_kernel() -> None:
    assert set(found_without_interpreter(__file__)) == {"_inputs_kernel", "_delta_kernel", "_gated_norm_kernel",
                                                        "_conv_kernel", "_keep_kernel"}


def compile_kernels() -> list[str]:
    from outrider.kernels.recurrent import CheckpointTargets
    from outrider.kernels.triton import gated_norm
    from outrider.kernels.triton.gated_delta import delta_steps
    from outrider.kernels.triton.recurrent_inputs import ConvParams, GateParams, recurrent_inputs
    from outrider.kernels.triton.recurrent_step import LayerTensors, StepConfig, StepTensors
    from outrider.kernels.triton.short_conv import conv_steps

    size, dtype = HEADS * DIM, torch.bfloat16
    ints = torch.zeros(64, dtype=torch.int64)
    step = StepTensors(torch.zeros(7, REQUESTS, dtype=torch.int64), ints[:TOKENS])
    layer = LayerTensors(torch.zeros(2, HEADS, DIM, DIM), torch.zeros(2, 3, 3 * size, dtype=dtype),
                         torch.zeros(2, WINDOW, 3 * size, dtype=dtype),
                         (torch.zeros(2, WINDOW, size, dtype=dtype), torch.zeros(2, WINDOW, HEADS, dtype=dtype)),
                         torch.zeros(8, 4096, dtype=dtype), 0)
    targets = CheckpointTargets(ints[: REQUESTS + 1], ints[:1], ints[:1], torch.zeros(1, 4, dtype=torch.int64))
    conv = ConvParams(torch.zeros(4, 3 * size), None)
    conv_in, y = torch.zeros(TOKENS, 3 * size, dtype=dtype), torch.zeros(TOKENS, size, dtype=dtype)
    gates = (y, torch.zeros(TOKENS, HEADS, dtype=dtype))
    with compiling() as found:
        for bound, tile in ((None, (1, 256, 2)), (-5.0, (8, 128, 2))):
            gate = GateParams("kda", torch.zeros(size), torch.zeros(HEADS), lower_bound=bound)
            inputs = recurrent_inputs(step, conv_in, gates, layer, conv, gate, tile=tile)
        for chunked, config in ((True, StepConfig(32, 4)), (False, StepConfig(16, 4)), (False, StepConfig(8, 4))):
            delta_steps(step, inputs, layer, num_key_heads=HEADS, targets=targets, chunked=chunked, config=config,
                        per_channel=True)
        conv_steps(step, conv_in, layer, conv)
        gated_norm(y, y, torch.zeros(DIM, dtype=dtype), DIM, 1e-5, False, "sigmoid", pdl=False)
    return found


if __name__ == "__main__":
    print(json.dumps(compile_kernels()))
