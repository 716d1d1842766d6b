"""The products of LoRA adapters that are added to a model's products, in plain torch: out += scale * (x A') B', for
each token row.

Each token row is computed by itself, with one order of additions. Rows without an adapter are not written. The tables
(`delta_tables.py`) say where the factors A and B are stored. This file does not depend on files, requests or layers.

The functions ending in `_by` take as an argument the function that multiplies token rows with a matrix. That function
must give a token row the same bits whatever other rows it is called with."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.kernels.activations import activate
from outrider.kernels.delta_tables import NO_SLOT, DeltaTables, RowSlots, TargetRange

Product = Callable[[Tensor, Tensor], Tensor]  # token rows [tokens, inputs] and a weight [outputs, inputs]


def sort_slots(slots: Tensor) -> RowSlots:
    """Sort token rows by their adapter slots [tokens] int64."""
    return RowSlots.from_slots(slots)


def row_products(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply token rows with a weight, one token row at a time, so that a row's bits do not depend on other rows."""
    return torch.cat([F.linear(row.clone(), weight) for row in x.split(1)])


def reduce_adapters(x: Tensor, rows: RowSlots, tables: DeltaTables, targets: range) -> Tensor:
    """Multiply x [tokens, inputs] with the first factor (A) of each token row's adapter. Returns [ranges, token rows in
    the order of `rows`, targets, ranks or more]: one partial sum for each range of the inputs; the caller adds these up
    in order. Elements beyond an adapter's rank, and of token rows without an adapter, are undefined."""
    return reduce_by(row_products, x, rows, tables, targets)


def reduce_by(product: Product, x: Tensor, rows: RowSlots, tables: DeltaTables, targets: range) -> Tensor:
    inner = x.new_zeros(1, len(x), len(targets), tables.max_rank)
    for slot, places in _rows_of_slots(rows.sorted_slots):
        for index, target in enumerate(targets):
            if (a := tables.first_factor(slot, target, x.shape[1])) is not None:
                inner[0, places, index, : len(a)] = product(x[rows.order[places]].contiguous(), a.contiguous())
    return inner


def add_adapters(inner: Tensor, out: Tensor, first: int, rows: RowSlots, tables: DeltaTables,
                 targets: TargetRange) -> None:
    """Add the adapters' results to `out` [tokens, features], which holds the output features of a linear layer from
    `first` on. inner: the result of `reduce_adapters` for the targets within these features."""
    add_by(row_products, inner, out, first, rows, tables, targets)


def add_by(product: Product, inner: Tensor, out: Tensor, first: int, rows: RowSlots, tables: DeltaTables,
           targets: TargetRange) -> None:
    total = inner[0]
    for part in inner[1:]:
        total = total + part
    for slot, places in _rows_of_slots(rows.sorted_slots):
        token_rows = rows.order[places]
        for index, target in enumerate(targets.within(first, first + out.shape[1])):
            if (found := tables.second_factor(slot, target)) is None:
                continue
            b, scale = found
            begin, end = tables.bounds[target].tolist()
            low, high = max(begin, first), min(end, first + out.shape[1])
            own = total[places, index, : len(b)].to(b.dtype).contiguous()
            delta = product(own, b[:, low - begin : high - begin].t().contiguous())
            out[token_rows, low - first : high - first] += (delta * scale).to(out.dtype)


def add_adapters_gated(inner: Tensor, out: Tensor, activation: str, rows: RowSlots, tables: DeltaTables,
                       targets: TargetRange) -> Tensor:
    """Add the adapters' results to out [tokens, 2 x width], the output features of a linear layer, and return the gated
    activation of the sum: [tokens, width]. `out` may be overwritten. inner: the result of `reduce_adapters`."""
    add_adapters(inner, out, 0, rows, tables, targets)
    return activate(out, activation)


def add_adapter_embeddings(out: Tensor, tokens: Tensor, gain: float, rows: RowSlots, tables: DeltaTables,
                           target: int) -> None:
    """Add `gain` times the adapters' embeddings of these token ids to out [tokens, hidden], which holds the model's
    embeddings."""
    add_embeddings_by(row_products, out, tokens, gain, rows, tables, target)


def add_embeddings_by(product: Product, out: Tensor, tokens: Tensor, gain: float, rows: RowSlots,
                      tables: DeltaTables, target: int) -> None:
    for slot, token_rows in _rows_of_slots(rows.slots):
        a, b, rank = tables.places[slot, target].tolist()
        if rank:
            looked_up = a + tokens[token_rows, None] * rank + torch.arange(rank, device=tokens.device)
            factor = tables.numbers[b : b + rank * out.shape[1]].view(rank, -1)
            delta = product(tables.numbers[looked_up], factor.t().contiguous())
            out[token_rows] += (delta * (tables.scales[slot, target].item() * gain)).to(out.dtype)


class HeadColumns(NamedTuple):
    """The output features of a latent expansion (kv_b_proj) that are keys, or those that are values; every head has
    both."""

    per_head: int  # output features of a head
    first: int
    width: int  # how many they are


def add_head_adapters(x: Tensor, out: Tensor, rows: RowSlots, tables: DeltaTables, target: int, columns: HeadColumns,
                      into_latents: bool) -> None:
    """Add the adapters' products to one part of a latent expansion: `columns` are the part's columns of `b` in each
    head. If into_latents is set, x [tokens, heads, keys] is multiplied with b, then a, and added to out [tokens, heads,
    latent]. Otherwise x [tokens, heads, latent] is multiplied with a, then b, and added to out [tokens, heads,
    values]."""
    add_heads_by(row_products, x, out, rows, tables, target, columns, into_latents)


def add_heads_by(product: Product, x: Tensor, out: Tensor, rows: RowSlots, tables: DeltaTables, target: int,
                 columns: HeadColumns, into_latents: bool) -> None:
    num_latents = (out if into_latents else x).shape[2]
    for slot, token_rows in _rows_of_slots(rows.slots):
        if (found := tables.factors(slot, target, num_latents)) is None:
            continue
        a, b, scale = found
        own = b.view(len(b), -1, columns.per_head)[:, :, columns.first : columns.first + columns.width]
        for head in range(x.shape[1]):
            pair = (own[:, head], a) if into_latents else (a, own[:, head])
            delta = _delta(product, x[token_rows, head], *pair)
            out[token_rows, head] += (delta * scale).to(out.dtype)


class ExpertTargets(NamedTuple):
    """The adapter targets of the experts' two projections."""

    first: int
    down: int


def mix_adapted_experts(out: Tensor, x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor,
                        activation: str, added: Tensor | None, rows: RowSlots, tables: DeltaTables,
                        targets: ExpertTargets) -> None:
    """Compute again the rows of out [tokens, hidden] whose adapter changes the experts. `out` holds the weighted sums
    of the experts plus `added`; the other arguments are those of `kernels.moe.experts`. An adapter's part of the first
    projection is added before the activation."""
    mix_experts_by(row_products, out, x, ids, weights, gate_up, down, activation, added, rows, tables, targets)


def mix_experts_by(product: Product, out: Tensor, x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor,
                   down: Tensor, activation: str, added: Tensor | None, rows: RowSlots, tables: DeltaTables,
                   targets: ExpertTargets) -> None:
    def project(x: Tensor, weight: Tensor, slot: int, target: int, expert: int) -> Tensor:
        made = product(x, weight[expert])
        if (found := tables.factors(slot, target, x.shape[1], expert)) is None:
            return made
        a, b, scale = found
        return made + scale * _delta(product, x, a, b)

    for slot, token_rows in _rows_of_slots(rows.slots):
        if not tables.places[slot, list(targets), 2].any():
            continue
        for row in token_rows.tolist():
            total = torch.zeros(down.shape[1], dtype=weights.dtype, device=x.device)
            for expert, weight in zip(ids[row].tolist(), weights[row], strict=True):
                inner = activate(project(x[row : row + 1], gate_up, slot, targets.first, expert), activation)
                total += weight * project(inner.to(x.dtype), down, slot, targets.down, expert)[0]
            own = total.to(out.dtype)
            out[row] = own if added is None else own + added[row]


def _delta(product: Product, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return (x A') B' of token rows x [tokens, inputs], for the factors a [rank, inputs] and b [rank, outputs]."""
    return product(product(x.contiguous(), a.contiguous()), b.t().contiguous())


def _rows_of_slots(slots: Tensor) -> list[tuple[int, Tensor]]:
    """List the adapter slots in use, each with the indices of its token rows. Reads the device."""
    return [(slot, (slots == slot).nonzero().flatten()) for slot in slots.unique().tolist() if slot != NO_SLOT]
