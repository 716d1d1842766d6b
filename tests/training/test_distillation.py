"""The loss in chunks of rows is the loss over all of them, and so are its gradients."""

from __future__ import annotations

import pytest
import torch

from outrider.training import distillation
from outrider.training.distillation import distillation_loss


@pytest.mark.parametrize("is_trained", [False, True])
def test_loss_and_gradients_are_those_of_whole_logits(is_trained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distillation, "CHUNK_ROWS", 4)
    random = torch.Generator().manual_seed(1)
    states = torch.randn(11, 6, generator=random, dtype=torch.float64).requires_grad_()
    weight = torch.randn(9, 6, generator=random, dtype=torch.float64).requires_grad_(is_trained)
    targets = 3 * torch.randn(13, 9, generator=random, dtype=torch.float64)
    places, row_weights = torch.randperm(13, generator=random)[:11], torch.rand(11, generator=random)
    inputs = [states, weight] if is_trained else [states]

    logits = states @ weight.t()
    wanted = targets[places].softmax(dim=-1)
    whole = (row_weights * -(wanted * logits.log_softmax(dim=-1)).sum(dim=-1)).sum()
    chunked = distillation_loss(states, weight, targets, places, row_weights)
    torch.testing.assert_close(chunked, whole)
    expected = torch.autograd.grad(3 * whole, inputs)
    found = torch.autograd.grad(3 * chunked, inputs)
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two)


def test_products_are_in_16_bits_where_autocast_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of the layers before, and gradients come back in the states' own dtype."""
    dtypes = []

    def spy(logits: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dtypes.append(logits.dtype)
        return distillation.distill_rows(logits, *others)

    monkeypatch.setattr(distillation, "rows_operation", spy)
    states, weight = torch.randn(3, 4).requires_grad_(), torch.randn(5, 4)
    with torch.autocast("cpu", torch.bfloat16):
        loss = distillation_loss(states, weight, torch.randn(3, 5), torch.arange(3), torch.ones(3))
    loss.backward()
    assert dtypes == [torch.bfloat16] and loss.dtype == torch.float32
    assert states.grad is not None and states.grad.dtype == torch.float32


def test_no_gradient_is_computed_where_none_is_asked_for() -> None:
    with torch.no_grad():
        loss = distillation_loss(torch.randn(3, 4), torch.randn(5, 4), torch.randn(3, 5), torch.arange(3),
                                 torch.ones(3))
    assert not loss.requires_grad
