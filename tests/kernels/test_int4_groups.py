"""Weights that are coded in int4 or int8 at load: what the search for scales and offsets promises."""

from __future__ import annotations

import pytest
import torch

from outrider.kernels.code_kinds import INT4
from outrider.kernels.scaled import Scaled, pack_nibbles, to_int4_groups, to_int8_groups

FORMS = pytest.mark.parametrize(("group", "has_offsets"), [(128, False), (32, False), (32, True)])


def draw(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rounded_to_nearest(weight: torch.Tensor, group: int, has_offsets: bool) -> torch.Tensor:
    """Numbers of codes that reach over the whole range of each group."""
    groups = weight.unflatten(1, (-1, group))
    low, high = torch.aminmax(groups, dim=-1, keepdim=True)
    scale = (high - low) / 15 if has_offsets else torch.where(high > -low, high, low) / -8
    offset = low + 8 * scale if has_offsets else torch.zeros_like(low)
    return (((groups - offset) / scale).round().clamp(-8, 7) * scale + offset).flatten(1)


@FORMS
def test_numbers_that_are_codes_already_come_back_exactly(group: int, has_offsets: bool) -> None:
    """As weights do that a file held in 4 bits before."""
    codes = torch.randint(0, 16, (24, 256), generator=torch.Generator().manual_seed(2))
    codes[:, ::group], codes[:, 1::group] = 0, 15
    scales = draw(24, 256 // group).abs().add(0.1).bfloat16()
    offsets = draw(24, 256 // group, seed=3).bfloat16() if has_offsets else None
    held = Scaled(INT4, group, pack_nibbles(codes, group), scales, offsets=offsets)
    made = to_int4_groups(held.numbers(), group, has_offsets)
    assert torch.equal(made.numbers(), held.numbers())


@FORMS
@pytest.mark.parametrize("power", [1, 3], ids=["normal", "with outliers"])
def test_no_group_is_worse_than_rounded_to_nearest(group: int, has_offsets: bool, power: int) -> None:
    """Errors are weighed by a number's size plus the group's root mean square. bfloat16 rounds the scales, which may
    cost a little where nothing is gained."""
    weight = draw(64, 512) ** power
    middle = torch.stack(torch.aminmax(weight.unflatten(1, (-1, group)), dim=-1)).mean(0)[..., None]
    centred = weight.unflatten(1, (-1, group)) - (middle if has_offsets else 0)
    importance = centred.abs() + centred.square().mean(-1, keepdim=True).sqrt()

    def errors(numbers: torch.Tensor) -> torch.Tensor:
        return ((numbers - weight).square().unflatten(1, (-1, group)) * importance).sum(-1)

    found = errors(to_int4_groups(weight, group, has_offsets).numbers())
    plain = errors(rounded_to_nearest(weight, group, has_offsets))
    assert (found <= 1.02 * plain).all()
    assert found.sum() < 0.97 * plain.sum()


@pytest.mark.parametrize("has_offsets", [False, True])
def test_groups_of_equal_numbers_and_of_numbers_that_are_not_finite(has_offsets: bool) -> None:
    weight = draw(4, 64)
    weight[0], weight[1], weight[2, 3], weight[3, 40] = 0, 0.75, torch.inf, torch.nan
    made = to_int4_groups(weight, 32, has_offsets)
    assert torch.equal(made.numbers()[:2], weight[:2])
    assert made.scales.isfinite().tolist() == [[True, True], [True, True], [False, True], [True, False]]


def test_a_number_in_int8_is_wrong_by_half_a_step_at_most() -> None:
    weight = draw(16, 128)
    weight[0], weight[1, 3] = 0, torch.nan
    made = to_int8_groups(weight, 32)
    steps = made.scales.float().repeat_interleave(32, 1)
    finite = weight.unflatten(1, (-1, 32)).isfinite().all(-1)
    assert torch.equal(made.scales.isfinite(), finite)
    # The scale is rounded to 8 bits, so that the extreme may lie a quarter of a step beyond code 127.
    inside = ((made.numbers() - weight).abs() <= 0.501 * steps).unflatten(1, (-1, 32))
    assert inside[finite].all() and torch.equal(made.numbers()[0], weight[0])
