"""The gated norm of recurrent layers and relu squared as kernels, against their twins in torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")

from outrider.kernels import reference
from outrider.kernels.gpu import gated_norm, relu2

NAN = float("nan")
EPS = 1e-5


def rows(device: torch.device, dtype: torch.dtype, tokens: int, width: int, seed: int = 0) -> torch.Tensor:
    """Random, as a slice of a wider projection whose other columns are not numbers."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.full((tokens, width + 11), NAN)
    wide[:, 3 : 3 + width] = torch.randn(tokens, width, generator=generator) * 2
    return wide.to(device, dtype)[:, 3 : 3 + width]


def assert_close(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    tolerance = 2e-2 if actual.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(actual.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("gate_first", [False, True], ids=["gate last", "gate first"])
@pytest.mark.parametrize(("groups", "group_size"), [(1, 1), (1, 100), (3, 7), (33, 128), (3, 1030), (2, 2500)])
def test_gated_norm(device: torch.device, dtype: torch.dtype, gate_first: bool, groups: int, group_size: int) -> None:
    size = groups * group_size
    y, z = (rows(device, dtype, 3, size, seed=i) for i in range(2))
    z[0, 0], z[0, -1] = 80.0, -80.0
    for weight in (rows(device, dtype, 1, n, seed=2)[0] for n in {size, group_size}):
        for activation in ("silu", "sigmoid"):
            wanted = reference.gated_norm(y.double(), z.double(), weight.double(), group_size, EPS, gate_first,
                                          activation)
            assert_close(gated_norm(y, z, weight, group_size, EPS, gate_first, activation), wanted)


@pytest.mark.parametrize("gate_first", [False, True], ids=["gate last", "gate first"])
def test_token_rows_and_groups_do_not_see_each_other(
    device: torch.device, dtype: torch.dtype, gate_first: bool
) -> None:
    y, z = (rows(device, dtype, 3, 24, seed=i) for i in range(2))
    weight = rows(device, dtype, 1, 8, seed=2)[0]
    clean = gated_norm(y, z, weight, 8, EPS, gate_first)
    poisoned = y.clone()
    poisoned[1] = NAN
    poisoned[2, 8] = NAN
    found = gated_norm(poisoned, z, weight, 8, EPS, gate_first)
    assert torch.equal(found[0], clean[0]) and found[1].isnan().all()
    assert torch.equal(found[2, :8], clean[2, :8]) and torch.equal(found[2, 16:], clean[2, 16:])
    assert torch.equal(gated_norm(y[2:], z[2:], weight, 8, EPS, gate_first), clean[2:])
    assert gated_norm(y[:0], z[:0], weight, 8, EPS, gate_first).shape == (0, 24)


def test_relu2(device: torch.device, dtype: torch.dtype) -> None:
    x = rows(device, dtype, 3, 1030)
    x[1, 5], x[2, 0] = NAN, -float("inf")
    found, wanted = relu2(x), reference.relu2(x)
    assert found[1, 5].isnan() and wanted[1, 5].isnan()
    assert torch.equal(found.nan_to_num(nan=-1.0), wanted.nan_to_num(nan=-1.0)), "rounded once, like torch"
    assert relu2(x[:0]).shape == (0, 1030)


def test_wrappers_name_what_is_wrong(device: torch.device, dtype: torch.dtype) -> None:
    y, weight = rows(device, dtype, 2, 24), rows(device, dtype, 1, 8)[0]
    good = {"y": y, "z": y, "weight": weight, "group_size": 8, "eps": EPS, "gate_first": True}
    wrong = {"y": y[0], "z": y[:1], "weight": weight[:7], "group_size": 5, "activation": "tanh"}
    for argument, value in wrong.items():
        with pytest.raises(ValueError, match=f"gated_norm: {argument} "):
            gated_norm(**(good | {argument: value}))
    with pytest.raises(ValueError, match="relu2: x "):
        relu2(y[0])
