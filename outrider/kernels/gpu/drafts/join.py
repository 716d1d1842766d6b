"""The inputs of draft heads in one launch: a token's embedding and a hidden state side by side, each normed or not.
Also gathers rows of two matrices for the next pass.

The result is rounded as if embedding, scale and norm were separate operations.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from outrider.kernels.gpu.common import FLOATS, cdiv, next_power_of_two, require, require_tensor
from outrider.kernels.gpu.launch.triton_kernel import kernel

_MAX_WIDTH = 65536


@triton.jit
def _store_part(value, gain, out, column, valid, width, eps, NORMS: tl.constexpr):
    if NORMS:
        factor = tl.load(gain + column, mask=valid, other=0.0).to(tl.float32)
        wide = value.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
        tl.store(out + column, (wide * inverse * factor).to(out.dtype.element_ty), mask=valid)
    else:
        tl.store(out + column, value, mask=valid)


@kernel(do_not_specialize_on_alignment=["tokens", "positions"])
def _join_kernel(
    tokens, positions, table, hidden, embedding_gain, hidden_gain, out, table_stride, hidden_stride, width, scale, eps,
    embedding_at, hidden_at,
    HAS_SCALE: tl.constexpr, HAS_POSITIONS: tl.constexpr, NORMS: tl.constexpr, COLUMNS: tl.constexpr,
):
    """Two programs serve each token row: one writes the embedding, the other the hidden state."""
    at = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    valid = column < width
    own = out + at * 2 * width
    if tl.program_id(1) == 0:
        token = tl.load(tokens + at)
        is_read = valid
        if HAS_POSITIONS:
            is_read = valid & (tl.load(positions + at) > 1)
        value = tl.load(table + token * table_stride + column, mask=is_read, other=0.0)
        if HAS_SCALE:
            value = (value.to(tl.float32) * scale).to(table.dtype.element_ty)
        _store_part(value, embedding_gain, own + embedding_at, column, valid, width, eps, NORMS)
    else:
        value = tl.load(hidden + at * hidden_stride + column, mask=valid, other=0.0)
        _store_part(value, hidden_gain, own + hidden_at, column, valid, width, eps, NORMS)


def join_embedding(
    tokens: torch.Tensor, table: torch.Tensor, hidden: torch.Tensor, *, scale: float | None = None,
    gains: tuple[torch.Tensor, torch.Tensor] | None = None, eps: float = 0.0, hidden_first: bool = False,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Place each token's embedding table[tokens] (times scale) and its hidden state [token rows, width] side by side:
    [token rows, 2 x width]. With `hidden_first` the hidden state comes first. Also returns a view of the hidden part.

    `gains`: the norm weights [width] of the embedding and of the hidden state. Embeddings at `positions` up to 1 are
    zero.
    """
    name, device = "join_embedding", hidden.device
    require_tensor(name, "hidden", hidden, (None, None), device, FLOATS)
    num_tokens, width = hidden.shape
    require(0 < width <= _MAX_WIDTH, name, "hidden", f"has {width} columns, allowed are 1 to {_MAX_WIDTH}")
    require_tensor(name, "tokens", tokens, (num_tokens,), device, (torch.int64,))
    if positions is not None:
        require_tensor(name, "positions", positions, (num_tokens,), device, (torch.int64,))
    require_tensor(name, "table", table, (None, width), device, (hidden.dtype,))
    for gain in gains or ():
        require_tensor(name, "gains", gain, (width,), device, FLOATS)
    out = torch.empty(num_tokens, 2 * width, dtype=hidden.dtype, device=device)
    result = out, out[:, :width] if hidden_first else out[:, width:]
    if num_tokens == 0:
        return result
    columns = next_power_of_two(width)
    embedding_gain, hidden_gain = gains or (hidden, hidden)
    _join_kernel[(num_tokens, 2)](
        tokens, tokens if positions is None else positions, table, hidden, embedding_gain, hidden_gain, out,
        table.stride(0), hidden.stride(0), width, scale or 1.0, eps, width if hidden_first else 0,
        0 if hidden_first else width,
        HAS_SCALE=scale is not None, HAS_POSITIONS=positions is not None, NORMS=gains is not None, COLUMNS=columns,
        num_warps=min(16, max(1, columns // 512)),
    )
    return result


@kernel(do_not_specialize_on_alignment=["index"])
def _take_kernel(
    first, second, index, first_out, second_out, first_stride, second_stride, first_width, second_width,
    COLUMNS: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    source = tl.load(index + at)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    valid = column < first_width
    value = tl.load(first + source * first_stride + column, mask=valid, other=0.0)
    tl.store(first_out + at * first_width + column, value, mask=valid)
    valid = column < second_width
    value = tl.load(second + source * second_stride + column, mask=valid, other=0.0)
    tl.store(second_out + at * second_width + column, value, mask=valid)


def take_rows(first: torch.Tensor, second: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather the same rows of two matrices in one launch: (first[index], second[index])."""
    name, device = "take_rows", first.device
    require_tensor(name, "first", first, (None, None), device, FLOATS)
    require_tensor(name, "second", second, (first.shape[0], None), device, FLOATS)
    require_tensor(name, "index", index, (None,), device, (torch.int64,))
    count, widths = index.shape[0], (first.shape[1], second.shape[1])
    out = [torch.empty(count, width, dtype=x.dtype, device=device)
           for x, width in zip((first, second), widths, strict=True)]
    columns = min(1024, next_power_of_two(max(widths)))
    if count:
        _take_kernel[(count, cdiv(max(widths), columns))](
            first, second, index, *out, first.stride(0), second.stride(0), *widths, COLUMNS=columns, num_warps=4
        )
    return out[0], out[1]
