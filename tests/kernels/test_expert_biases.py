"""Experts with biases and gpt-oss's activation in Triton, against their reference, in numbers and in MXFP4."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")

from outrider.kernels import moe, reference
from outrider.kernels.activations import CLAMPED, limited_silu
from outrider.kernels.gpu.experts.biases import clamped_swiglu
from outrider.kernels.gpu.experts.moe import exact_experts, experts
from outrider.kernels.gpu.experts.scaled import exact_scaled_experts, scaled_experts
from outrider.kernels.moe import ExpertBiases
from tests.kernels.test_triton_scaled_experts import draw, make

EXPERTS, TOP, HIDDEN, WIDTH = 5, 2, 96, 32


def given(device: torch.device, num_tokens: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Token rows, ids and weights."""
    x = draw(num_tokens, HIDDEN, seed=seed).to(device)
    ids = torch.stack([torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(row))[:TOP]
                       for row in range(num_tokens)]).to(device)
    return x, ids, torch.rand(num_tokens, TOP, generator=torch.Generator().manual_seed(1)).to(device)


def biases_of(device: torch.device, has_down: bool = True) -> ExpertBiases:
    down = draw(EXPERTS, HIDDEN, seed=8).to(device) if has_down else None
    return ExpertBiases(draw(EXPERTS, 2 * WIDTH, seed=7).to(device) * 4, down)


@pytest.mark.parametrize("num_tokens", [1, 3, 70])
@pytest.mark.parametrize("has_down", [True, False])
def test_experts_of_numbers(device: torch.device, num_tokens: int, has_down: bool) -> None:
    gate_up, down = draw(EXPERTS, 2 * WIDTH, HIDDEN, seed=2).to(device), draw(EXPERTS, HIDDEN, WIDTH, seed=3).to(device)
    biases, added = biases_of(device, has_down), draw(num_tokens, HIDDEN, seed=4).to(device)
    args = (*given(device, num_tokens), gate_up, down, CLAMPED, added, biases)
    wanted = moe.experts(*args)
    for kernel in (experts, exact_experts):
        torch.testing.assert_close(kernel(*args), wanted, atol=1e-4, rtol=1e-4)
    assert (moe.experts(*args[:-1]) - wanted).abs().max() > 1


@pytest.mark.parametrize("num_tokens", [1, 70])
def test_experts_with_limits(device: torch.device, num_tokens: int) -> None:
    """GLM5-Next's activation, in numbers and in MXFP4."""
    gate_up, down = draw(EXPERTS, 2 * WIDTH, HIDDEN, seed=2).to(device), draw(EXPERTS, HIDDEN, WIDTH, seed=3).to(device)
    args = (*given(device, num_tokens), gate_up, down, limited_silu(1.5), draw(num_tokens, HIDDEN, seed=4).to(device))
    wanted = moe.experts(*args)
    for kernel in (experts, exact_experts):
        torch.testing.assert_close(kernel(*args), wanted, atol=1e-4, rtol=1e-4)
    assert (moe.experts(*args[:-2], "silu", args[-1]) - wanted).abs().max() > 0.1
    coded = [make(device, "mxfp4", *sizes, EXPERTS, seed) for sizes, seed in
             (((2 * WIDTH, HIDDEN), 5), ((HIDDEN, WIDTH), 6))]
    of_codes: tuple[Any, ...] = (*given(device, num_tokens), *coded, limited_silu(1.5))
    for kernel in (scaled_experts, exact_scaled_experts):
        torch.testing.assert_close(kernel(*of_codes), moe.scaled_experts(*of_codes), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("num_tokens", [2, 70])
def test_experts_in_mxfp4(device: torch.device, num_tokens: int) -> None:
    gate_up, down = (make(device, "mxfp4", *sizes, EXPERTS, seed) for sizes, seed in
                     (((2 * WIDTH, HIDDEN), 5), ((HIDDEN, WIDTH), 6)))
    args: tuple[Any, ...] = (*given(device, num_tokens), gate_up, down, CLAMPED, None, False, biases_of(device))
    wanted = moe.scaled_experts(*args)
    for kernel in (scaled_experts, exact_scaled_experts):
        torch.testing.assert_close(kernel(*args), wanted, atol=1e-3, rtol=1e-3)


def test_values_beyond_the_limits_and_bad_ones(device: torch.device) -> None:
    x = torch.tensor([[8.0, -30.0, float("nan"), 0.5, 9.0, -9.0, 1.0, float("nan")]], device=device)
    found = clamped_swiglu(x, torch.zeros(1, dtype=torch.int64, device=device), None)
    torch.testing.assert_close(found, reference.clamped_swiglu(x), equal_nan=True)
    assert found.isnan().tolist() == [[False, False, True, True]], "a bad value stays bad, and touches no other"


def test_biases_with_another_activation_are_refused(device: torch.device) -> None:
    gate_up, down = torch.zeros(EXPERTS, 2 * WIDTH, HIDDEN, device=device), torch.zeros(EXPERTS, HIDDEN, WIDTH,
                                                                                        device=device)
    with pytest.raises(ValueError, match="biases are served with the activation 'clamped_swiglu' alone"):
        experts(*given(device, 1), gate_up, down, "silu", None, biases_of(device))
