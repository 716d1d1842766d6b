"""Attention of unrolled passes by flash kernels is dense attention, and so are its gradients."""

from __future__ import annotations

import pytest
import torch

from outrider.trainable.unrolled_attention import dense_attention, flash_attention


@pytest.mark.parametrize("num_passes", [1, 2, 4])
def test_flash_kernels_give_the_dense_result_and_its_gradients(num_passes: int) -> None:
    random = torch.Generator().manual_seed(num_passes)

    def made(heads: int) -> torch.Tensor:
        return torch.randn(2, heads, 24, 8, generator=random, dtype=torch.float64).requires_grad_()

    query = made(6)
    keys, values = ([made(2) for _ in range(num_passes)] for _ in range(2))
    inputs = [query, *keys, *values]
    dense = dense_attention(query, keys, values, 0.7)
    flash = flash_attention(query, keys, values, 0.7)
    torch.testing.assert_close(flash, dense)
    outer = torch.randn(dense.shape, generator=random, dtype=torch.float64)
    expected = torch.autograd.grad(dense, inputs, outer)
    for one, two in zip(torch.autograd.grad(flash, inputs, outer), expected, strict=True):
        torch.testing.assert_close(one, two)
