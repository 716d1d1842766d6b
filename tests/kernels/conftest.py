"""Where Triton kernels are tested: on the card in bf16 and float32, else under Triton's interpreter in float32."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Read when triton is imported and when a kernel is defined, so it has to be set before both.
    os.environ.setdefault("TRITON_INTERPRET", "1")

HAS_CARD = torch.cuda.is_available()
IS_RECORDED = "OUTRIDER_RECORD" in os.environ  # launches are written down, and no kernel runs


@pytest.fixture(scope="session")
def device() -> torch.device:
    if HAS_CARD:
        return torch.device("cuda", torch.cuda.current_device())
    if IS_RECORDED:
        return torch.device("cpu")
    from triton.language import standard
    from triton.runtime.interpreter import InterpretedFunction

    from tests.kernels.interpreter import make_quick

    if not isinstance(standard.sum, InterpretedFunction):
        pytest.skip("triton was imported before TRITON_INTERPRET=1 was set, and there is no CUDA device")
    make_quick()
    return torch.device("cpu")


@pytest.fixture(params=["float32", "bfloat16"] if HAS_CARD or IS_RECORDED else ["float32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    # The interpreter's dot products need float32.
    return getattr(torch, request.param)
