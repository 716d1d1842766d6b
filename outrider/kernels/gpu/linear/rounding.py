"""Rounding of token rows to fp8 for products, either by a kernel of its own or by the kernel that makes the rows.

A kernel that makes token rows can round them too, if its caller asks for this because a product will need it. It
attaches the codes to the tensor that it returns (`keep_rounded`), where the product finds them, which saves a launch. A
tensor with codes attached must not be changed in place."""

from __future__ import annotations

import torch
import triton.language as tl

from outrider.kernels.gpu.common import (
    FLOATS,
    cdiv,
    next_power_of_two,
    pdl_options,
    release_dependents,
    require_tensor,
    uses_pdl,
    wait_for_inputs,
)
from outrider.kernels.gpu.launch.triton_kernel import kernel
from outrider.kernels.gpu.linear.scaled_codes import store_rounded
from outrider.kernels.scaled import Rounded

LIBRARY_ROWS = 64  # token rows above which the library's products are faster
MULTIPLE = 4  # of token rows: distances between groups of scales are multiples of 16 bytes


@kernel(do_not_specialize=["scale_t", "scale_g"])
def _round_kernel(
    x, codes, scales, x_stride, scale_t, scale_g, K: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    WIDTH: tl.constexpr, PDL: tl.constexpr,
):
    """Round one token row: codes [tokens, K] and scales [tokens, groups]."""
    release_dependents(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    inside_group = tl.arange(0, WIDTH)[None, :]
    column = tl.arange(0, GROUPS)[:, None] * GROUP + inside_group
    inside = (inside_group < GROUP) & (column < K)
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    store_rounded(value, codes + row * K, scales + row * scale_t, scale_g, K, GROUP)


def empty_rounded(num_rows: int, k: int, group: int, device: torch.device, by_group: bool) -> Rounded:
    """Allocate codes and scales. by_group: the scales of a group are stored side by side, perhaps with room for a few
    more token rows."""
    groups = cdiv(k, group)
    if by_group:
        num_rows = cdiv(num_rows, MULTIPLE) * MULTIPLE
    codes = torch.empty(num_rows, k, dtype=torch.float8_e4m3fn, device=device)
    scales = torch.empty(num_rows, groups, dtype=torch.float32, device=device)
    return Rounded(codes, scales.view(groups, num_rows).t() if by_group else scales)


def rounding_warps(k: int) -> int:
    """Return the warps of a program with one token row: many, because divisions take time and there may be only one
    row."""
    return min(32, max(4, next_power_of_two(k) // 256))


def round_rows(x: torch.Tensor, group: int, *, by_group: bool = False, pdl: bool | None = None) -> Rounded:
    """Round x [tokens, k] to fp8; see `kernels.scaled.round_to_fp8`. by_group: store the scales of each group side by
    side."""
    require_tensor("round_rows", "x", x, (None, None), x.device, FLOATS)
    num_rows, k = x.shape
    made = empty_rounded(num_rows, k, group, x.device, by_group)
    pdl = uses_pdl(x.device) if pdl is None else pdl
    if num_rows:
        _round_kernel[(num_rows,)](
            x, *made, x.stride(0), *made.scales.stride(), K=k, GROUP=group, GROUPS=next_power_of_two(cdiv(k, group)),
            WIDTH=next_power_of_two(group), PDL=pdl, num_warps=rounding_warps(k), **pdl_options(pdl))
    return made


def keep_rounded(x: torch.Tensor, group: int, made: Rounded) -> None:
    """Attach fp8 codes to x, so that a product can find them. Columns are grouped, and each group of a row has one
    scale; with several groups the scales are laid out by group."""
    x.rounded = group, made


def rounded_rows(x: torch.Tensor, group: int, by_group: bool) -> Rounded:
    """Return the codes that were attached to x; if there are none, make them."""
    kept_group, made = getattr(x, "rounded", (0, None))
    if made is not None and kept_group == group and by_group == (group < x.shape[1]):
        return made
    return round_rows(x, group, by_group=by_group)
