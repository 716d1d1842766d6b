"""Copies of weights by way of slices hold the same numbers, whatever their shape, strides and dtypes."""

from __future__ import annotations

import pytest
import torch

from outrider.formats.upload import copy_in_slices, copy_weight, upload

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
SHAPES = [(1,), (7,), (1 << 19,), (513, 1031), (5, 67, 2049), (3, 1 << 19), (0, 4), (4, 0), ()]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_weight_arrives_whole(shape: tuple[int, ...], device: str) -> None:
    tensor = torch.randn(shape)
    target = torch.full(shape, torch.nan, dtype=torch.bfloat16, device=device)
    copy_weight(target, tensor)
    assert torch.equal(target.cpu(), tensor.bfloat16())
    assert torch.equal(upload(tensor, torch.device(device)).cpu(), tensor)


@pytest.mark.parametrize("device", DEVICES)
def test_a_part_of_a_tensor_arrives_in_a_part_of_a_weight(device: str) -> None:
    tensor, weight = torch.randn(2048, 3000), torch.zeros(3, 2048, 1500, device=device)
    copy_weight(weight[1], tensor[:, 700:2200])
    assert torch.equal(weight[1].cpu(), tensor[:, 700:2200]) and not weight[::2].any()
    copy_weight(weight[0].T, tensor.T[:1500])
    assert torch.equal(weight[0].cpu(), tensor[:, :1500])


@pytest.mark.parametrize("slice_bytes", [1, 64, 1000, 1 << 20])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape], ids=str)
def test_slices_of_every_size_cover_a_tensor_once(shape: tuple[int, ...], slice_bytes: int) -> None:
    if len(torch.empty(shape, device="meta")) > 1000 and slice_bytes < 1000:
        pytest.skip("a slice for every number")
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)
    target = torch.full(shape, torch.nan, dtype=torch.float64)
    assert torch.equal(copy_in_slices(target, tensor, pin=False, slice_bytes=slice_bytes), tensor)
