"""The kernel of a drafter's loss against its twin in torch; and the compiler takes it at the sizes of training."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")

from outrider.kernels.gpu.drafts import distillation
from outrider.training.distillation import distill_rows
from tests.kernels.compiled import compiling, found_without_interpreter


def case(device: torch.device, dtype: torch.dtype, rows: int, vocab_size: int) -> tuple[torch.Tensor, ...]:
    """Logits beside columns that are not numbers, targets that a place's tokens can be missing from, and places in any
    order, some of them twice."""
    random = torch.Generator().manual_seed(rows + vocab_size)
    logits = torch.full((rows, vocab_size + 5), float("nan"))
    logits[:, :vocab_size] = 8 * torch.randn(rows, vocab_size, generator=random)
    targets = 8 * torch.randn(rows + 2, vocab_size, generator=random)
    targets[::2, : vocab_size // 2] = -torch.inf
    places = torch.randint(rows + 2, (rows,), generator=random)
    weights = torch.rand(rows, generator=random)
    return logits.to(device, dtype)[:, :vocab_size], targets.to(device), places.to(device), weights.to(device)


@pytest.mark.parametrize(("rows", "vocab_size"), [(1, 1), (3, 7), (5, 64), (3, 300)])
def test_losses_and_gradients_are_those_of_the_twin(device: torch.device, dtype: torch.dtype, rows: int,
                                                    vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distillation, "_COLUMNS", 64)  # so that a row has several parts
    logits, targets, places, weights = case(device, dtype, rows, vocab_size)
    losses, gradient = distill_rows.reference(logits.double(), targets.double(), places, weights.double())
    found, own = distillation.distill_rows(logits, targets, places, weights)
    torch.testing.assert_close(found.double(), losses, rtol=1e-5, atol=1e-5)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(own.double(), gradient, rtol=tolerance, atol=1e-6)
    assert own.data_ptr() == logits.data_ptr()


def test_rows_that_do_not_fit_are_refused(device: torch.device) -> None:
    logits, targets, places, weights = case(device, torch.float32, 3, 7)
    with pytest.raises(ValueError, match="places"):
        distillation.distill_rows(logits, targets, places[:2], weights)
    with pytest.raises(ValueError, match="target_logits"):
        distillation.distill_rows(logits, targets[:, :6], places, weights)


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests compile it")
def test_the_compiler_takes_the_kernel() -> None:
    assert found_without_interpreter(__file__) == ["_distill_kernel"] * 2


if __name__ == "__main__":
    with compiling() as names:
        for dtype in (torch.bfloat16, torch.float32):
            distillation.distill_rows(torch.zeros(4, 16384, dtype=dtype), torch.zeros(4, 16384),
                                      torch.zeros(4, dtype=torch.int64), torch.zeros(4))
    print(json.dumps(names))
