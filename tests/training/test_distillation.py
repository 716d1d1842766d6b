"""The loss in chunks of rows is the loss over all of them, and so are its gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

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
    dtypes, operation = [], distillation.distill_rows

    def spy(logits: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dtypes.append(logits.dtype)
        return operation(logits, *others)

    monkeypatch.setattr(distillation, "distill_rows", spy)
    states, weight = torch.randn(3, 4).requires_grad_(), torch.randn(5, 4)
    with torch.autocast("cpu", torch.bfloat16):
        loss = distillation_loss(states, weight, torch.randn(3, 5), torch.arange(3), torch.ones(3))
    loss.backward()
    assert dtypes == [torch.bfloat16] and loss.dtype == torch.float32
    assert states.grad is not None and states.grad.dtype == torch.float32


class ProductCounter(TorchDispatchMode):
    """Counts matrix products, those inside of an autograd function too."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("for_states", "for_weight", "num_products"),
                         [(False, False, 1), (True, False, 2), (False, True, 2), (True, True, 3)])
def test_only_gradients_that_are_asked_for_are_computed(for_states: bool, for_weight: bool, num_products: int) -> None:
    """The logits take one product, and each gradient one more."""
    states, weight = torch.randn(3, 4).requires_grad_(for_states), torch.randn(5, 4).requires_grad_(for_weight)
    with ProductCounter() as counter:
        distillation_loss(states, weight, torch.randn(3, 5), torch.arange(3), torch.ones(3))
    assert counter.count == num_products
