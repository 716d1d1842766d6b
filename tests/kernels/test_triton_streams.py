"""The kernels of residual streams against their torch twins: odd sizes, strided inputs, token rows by themselves."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")

from outrider.kernels import streams as twins
from outrider.kernels.gpu.elements import streams as kernels

EPS = 1e-6
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def rows(device: torch.device, dtype: torch.dtype, tokens: int, width: int, seed: int) -> torch.Tensor:
    """Random, as a slice of a wider tensor whose other columns are not numbers."""
    wide = torch.full((tokens, width + 5), torch.nan)
    wide[:, 2 : 2 + width] = torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed)) * 2
    return wide.to(device, dtype)[:, 2 : 2 + width]


@pytest.mark.parametrize(("num_streams", "size"), [(4, 64), (3, 33), (2, 1030)])
def test_streams(device: torch.device, dtype: torch.dtype, num_streams: int, size: int) -> None:
    width, near = num_streams * size, {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    x, weights = rows(device, dtype, 5, size, 0), rows(device, dtype, 5, num_streams, 1)
    before, gain = rows(device, dtype, 5, width, 2), rows(device, torch.float32, 1, width, 3)[0].contiguous()
    for given in ((x, weights), (None, None)):
        mine, theirs = before.clone(), before.clone()
        normed = kernels.join_streams(*given, mine, gain, EPS, num_streams, pdl=False)
        torch.testing.assert_close(normed, twins.join_streams(*given, theirs, gain, EPS, num_streams), **near)
        torch.testing.assert_close(mine, theirs, **near)
        alone = before[3:4].clone()
        of_row = tuple(None if part is None else part[3:4] for part in given)
        assert torch.equal(kernels.join_streams(*of_row, alone, gain, EPS, num_streams, pdl=False)[0], normed[3])
    torch.testing.assert_close(kernels.mix_streams(before, normed, num_streams, pdl=False),
                               twins.mix_streams(before, normed, num_streams), **near)
    assert kernels.mix_streams(before[:0], normed[:0], num_streams, pdl=False).shape == (0, size)


@pytest.mark.parametrize("has_weights", [True, False])
def test_gates(device: torch.device, dtype: torch.dtype, has_weights: bool) -> None:
    projected = rows(device, dtype, 3, 21, 4)
    projected[0, 0], projected[1, -1] = 90.0, -90.0
    for mine, theirs in zip(kernels.stream_gates(projected, 3, has_weights, pdl=False),
                            twins.stream_gates(projected, 3, has_weights), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_rows_that_disagree_are_refused(device: torch.device) -> None:
    streams, gain = torch.zeros(3, 8, device=device), torch.zeros(8, device=device)
    with pytest.raises(ValueError, match="join_streams: x has shape"):
        kernels.join_streams(torch.zeros(2, 4, device=device), torch.zeros(3, 2, device=device), streams, gain, EPS, 2)
    with pytest.raises(ValueError, match="expected 3 streams"):
        kernels.join_streams(None, None, streams, gain, EPS, 3)
