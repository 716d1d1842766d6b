"""Float32 products of the library in pieces: the same product, with no chain of additions longer than a piece."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.kernels import float32_products, ops
from outrider.kernels.float32_products import MAX_ROWS, PIECE, summed_product


class ChainLengths(TorchDispatchMode):
    """Inner sizes of all products that the library is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm,
                                   torch.ops.aten.addmm_, torch.ops.aten.linear):
            self.lengths.append(next(a for a in args[::-1] if isinstance(a, torch.Tensor)).shape[-2])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("inputs", [129, 256, 640])
@pytest.mark.parametrize("max_partial", [1, 1 << 24])
def test_products_in_pieces(monkeypatch: pytest.MonkeyPatch, inputs: int, max_partial: int) -> None:
    """Pieces one by one and all at once, with what is left behind the last whole one."""
    monkeypatch.setattr(float32_products, "MAX_PARTIAL", max_partial)
    wide, weight, bias = torch.randn(5, inputs + 3), torch.randn(7, inputs), torch.randn(7)
    x = wide[:, :inputs]
    with ChainLengths() as seen:
        made = summed_product(x, weight, bias)
    assert seen.lengths and max(seen.lengths) <= PIECE
    torch.testing.assert_close(made.double(), x.double() @ weight.double().t() + bias.double(), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(summed_product(x, weight), made - bias, atol=1e-5, rtol=1e-5)


def test_which_products_are_made_in_pieces() -> None:
    """Those of float32 and several token rows, as a padded step has; one token row is left to the library."""
    weight = torch.randn(3, 2 * PIECE)
    with ops.using("library", ops.linear):
        for rows, is_taken in ((1, False), (2, True), (64, True), (MAX_ROWS, True), (MAX_ROWS + 1, False)):
            assert ops.linear.has_kernel(torch.empty(rows, 2 * PIECE), weight) == is_taken
        assert not ops.linear.has_kernel(torch.empty(64, PIECE), weight[:, :PIECE]), "it is a piece"
        assert not ops.linear.has_kernel(torch.empty(64, 2 * PIECE).bfloat16(), weight.bfloat16())
