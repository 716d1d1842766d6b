"""The kernels of KDA layers, at the sizes of Kimi-Linear, and of short convolutions compile for an H200 that is not
there: the interpreter takes what the compiler may refuse. This file runs as a program, in which Triton does not
interpret."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")

from tests.kernels.compiled import compiling, found_without_interpreter

HEADS, DIM, WINDOW, REQUESTS, TOKENS = 32, 128, 3, 2, 40


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests compile them")
def test_the_compiler_takes_every_kernel() -> None:
    assert set(found_without_interpreter(__file__)) == {"_inputs_kernel", "_prepare_kernel", "_delta_kernel",
                                                        "_gated_norm_kernel", "_conv_kernel", "_keep_kernel"}


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a compiler that no card is behind")
def test_states_are_loaded_before_the_inputs_are_there_and_21_programs_fit_a_multiprocessor() -> None:
    """With checkpoints, which take registers though hardly a step writes one."""
    found = found_without_interpreter(__file__, "decode")
    assert 0 < found["states"] < found["wait"] < found["inputs"]
    assert found["registers"] <= 65536 / (21 * 32) and found["spilled"] == 0


def made_tensors() -> dict[str, Any]:
    """Arguments at the sizes of Kimi-Linear."""
    from outrider.kernels.gpu.recurrent.step_tensors import LayerTensors, StepTensors
    from outrider.kernels.recurrent import CheckpointTargets

    size, dtype = HEADS * DIM, torch.bfloat16
    ints = torch.zeros(64, dtype=torch.int64)
    step = StepTensors(torch.zeros(7, REQUESTS, dtype=torch.int64), ints[:TOKENS])
    layer = LayerTensors(torch.zeros(2, HEADS, DIM, DIM), torch.zeros(2, 3, 3 * size, dtype=dtype),
                         torch.zeros(2, WINDOW, 3 * size, dtype=dtype),
                         (torch.zeros(2, WINDOW, size, dtype=dtype), torch.zeros(2, WINDOW, HEADS, dtype=dtype)),
                         torch.zeros(8, 4096, dtype=dtype), 0)
    targets = CheckpointTargets(ints[: REQUESTS + 1], ints[:1], ints[:1], torch.zeros(1, 4, dtype=torch.int64))
    y = torch.zeros(TOKENS, size, dtype=dtype)
    return {"step": step, "layer": layer, "targets": targets, "y": y,
            "conv_in": torch.zeros(TOKENS, 3 * size, dtype=dtype),
            "gates": (y, torch.zeros(TOKENS, HEADS, dtype=dtype))}


def compile_decode_kernel() -> dict[str, int]:
    """Places in the code of what it loads and where it waits, and registers of a thread."""
    from triton.compiler.compiler import CompiledKernel
    from triton.runtime import driver

    from outrider.kernels.gpu.gated_delta import steps as gated_delta
    from outrider.kernels.gpu.launch import triton_kernel as launch
    from outrider.kernels.gpu.recurrent.step_tensors import StepInputs
    from tests.kernels.test_sampler_compiles import Card

    driver.set_active(Card())  # type: ignore[arg-type]
    gated_delta.uses_pdl = lambda device: True  # type: ignore[assignment]
    made, rows = made_tensors(), REQUESTS * WINDOW + TOKENS
    inputs = StepInputs(made["conv_in"], made["gates"], torch.zeros(rows, 3 * HEADS * DIM),
                        (torch.zeros(rows, HEADS * DIM), torch.zeros(rows, HEADS)))
    kernels: list[CompiledKernel] = []
    with launch.collecting(lambda function, args, options: kernels.append(
            function.run(*args, grid=(1,), warmup=True, **options))):
        gated_delta.delta_steps(made["step"], inputs, made["layer"], num_key_heads=HEADS, targets=made["targets"],
                                per_channel=True, follows_inputs=True)
    ptx, sass = kernels[0].asm["ptx"], kernels[0].asm["sass"]
    wait = ptx.index("griddepcontrol.wait")
    return {"states": ptx.rindex("L1::evict_first", 0, wait), "wait": wait, "inputs": ptx.index("ld.global.v4", wait),
            "registers": 1 + max(int(number) for number in re.findall(r"\bR(\d+)\b", sass)),
            "spilled": len(re.findall(r"\b(?:LDL|STL)\b", sass))}


def compile_kernels() -> list[str]:
    from outrider.kernels.gpu import gated_norm
    from outrider.kernels.gpu.gated_delta.steps import delta_steps
    from outrider.kernels.gpu.recurrent.inputs import ConvParams, GateParams, recurrent_inputs
    from outrider.kernels.gpu.recurrent.short_conv import conv_steps

    made, size = made_tensors(), HEADS * DIM
    step, layer, conv_in, gates, y = (made[name] for name in ("step", "layer", "conv_in", "gates", "y"))
    conv = ConvParams(torch.zeros(4, 3 * size), None)
    with compiling() as found:
        for bound, tile in ((None, (1, 256, 2)), (-5.0, (8, 128, 2))):
            gate = GateParams("kda", torch.zeros(size), torch.zeros(HEADS), lower_bound=bound)
            inputs = recurrent_inputs(step, conv_in, gates, layer, conv, gate, tile=tile)
        for chunked in (True, False):
            delta_steps(step, inputs, layer, num_key_heads=HEADS, targets=made["targets"], chunked=chunked,
                        per_channel=True)
        whole = inputs._replace(gates=(gates[1], gates[1]), wide_gates=(inputs.wide_gates[1],) * 2)
        own = layer._replace(gates=(layer.gates[1],) * 2)
        delta_steps(step, whole, own, num_key_heads=HEADS, targets=made["targets"], chunked=True)
        conv_steps(step, conv_in, layer, conv)
        gated_norm(y, y, torch.zeros(DIM, dtype=torch.bfloat16), DIM, 1e-5, False, "sigmoid", pdl=False)
    return found


if __name__ == "__main__":
    print(json.dumps(compile_decode_kernel() if "decode" in sys.argv else compile_kernels()))
