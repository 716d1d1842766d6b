"""The `torch` backend: plain torch for any device and any float type. Other backends are tested against it.

Requests with few tokens are attended together, padded to the longest of them. Longer requests are attended one by one.
Gathered keys and values beyond a request's length are zeroed, since 0 x NaN is NaN and free pages may hold anything.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.cache.groups import Group
from outrider.mixers.batch import BatchView, ExactQueries, ExtraKeys, KeysFrom, VisibleKeys, check_rows
from outrider.mixers.paged.backend import AttentionLayer, Backend, KeyValueCache, check_writes
from outrider.mixers.paged.masks import QueryMarks, visible_keys

SHORT_QUERY = 16  # requests of at most this many tokens are attended together


@dataclass(frozen=True)
class PaddedRequests:
    """Requests attended together, padded to `query` tokens and `keys` keys each."""

    pages: torch.Tensor  # [requests, columns]
    token_rows: torch.Tensor  # [requests, query] token row of each query; padding repeats the last
    is_query: torch.Tensor  # [requests * query] token rows that are written back
    lengths: torch.Tensor  # [requests]
    visible: VisibleKeys  # keys that these requests see
    marks: QueryMarks  # of the queries, [requests, query, 1] each


@dataclass(frozen=True)
class Plan:
    parts: list[PaddedRequests]
    write_slots: torch.Tensor  # slots of live tokens
    write_rows: torch.Tensor  # their token rows
    num_tokens: int


class TorchBackend(Backend):
    name = "torch"
    is_capturable = False
    takes_masks = True

    def plan(self, view: BatchView, group: Group) -> Plan:
        check_rows(view, group)
        slots = view.slots(group)
        live_rows = (slots >= 0).nonzero().squeeze(1)  # waits for the device, which a plan of this backend may do
        lengths = view.lengths.tolist()
        starts = view.query_starts.tolist()
        lens = view.queries.lens if isinstance(view.queries, ExactQueries) else view.query_starts.diff().tolist()
        short = [r for r, n in enumerate(lens) if 0 < n <= SHORT_QUERY and lengths[r] > 0]
        long = [r for r, n in enumerate(lens) if n > SHORT_QUERY and lengths[r] > 0]
        parts = [_part(view, group, members, lengths, starts) for members in [short, *([r] for r in long)] if members]
        return Plan(parts, slots[live_rows], live_rows, view.num_tokens)

    def run(self, layer: AttentionLayer, cache: KeyValueCache, q: torch.Tensor, k: torch.Tensor | None,
            v: torch.Tensor | None, plan: Plan) -> torch.Tensor:
        if k is not None and v is not None:
            self.write(layer, cache, k, v, plan)
        out = q.new_zeros(plan.num_tokens, layer.num_heads * layer.head_dim)
        for part in plan.parts:
            result = _attend(layer, cache, q, part)  # [requests * query, heads * dim]
            rows = part.token_rows.reshape(-1)
            out[rows[part.is_query]] = result[part.is_query]
        return out

    def write(self, layer: AttentionLayer, cache: KeyValueCache, k: torch.Tensor, v: torch.Tensor, plan: Plan) -> None:
        check_writes(layer)
        write_cache(cache, plan, k, v)


def write_cache(cache: KeyValueCache, plan: Plan, k: torch.Tensor, v: torch.Tensor) -> None:
    page_tokens = cache.k.shape[1]
    pages, offsets = plan.write_slots // page_tokens, plan.write_slots % page_tokens
    encoded = cache.codec.encode(k[plan.write_rows], v[plan.write_rows])
    for name, part in cache.parts.items():
        part[pages, offsets] = encoded[name].to(part.dtype)


def _part(view: BatchView, group: Group, members: list[int], lengths: list[int], starts: list[int]) -> PaddedRequests:
    device = view.rows.device
    lens = [starts[r + 1] - starts[r] for r in members]
    query = max(lens)
    columns = -(-max(lengths[r] for r in members) // group.page_tokens)
    index = torch.tensor(members, device=device)
    first = torch.tensor([starts[r] for r in members], device=device)
    count = torch.tensor(lens, device=device)
    steps = torch.arange(query, device=device)
    token_rows = first[:, None] + torch.minimum(steps, count[:, None] - 1)
    positions = view.positions[token_rows]
    none = torch.zeros_like(positions)
    extra = (none, none)
    if isinstance(view.extra_keys, ExtraKeys):
        extra = view.extra_keys.starts[token_rows], view.extra_keys.ends[token_rows]
    return PaddedRequests(
        pages=view.page_table(group)[index, :columns].long(),
        token_rows=token_rows,
        is_query=(steps < count[:, None]).reshape(-1).nonzero().squeeze(1),
        lengths=view.lengths[index],
        visible=_of_requests(view.visible, index),
        marks=QueryMarks(positions[..., None], extra[0][..., None], extra[1][..., None]),
    )


def _of_requests(visible: VisibleKeys, index: torch.Tensor) -> VisibleKeys:
    if isinstance(visible, KeysFrom):
        return KeysFrom(visible.starts[index], visible.starts_int32[index])
    return visible


def _attend(layer: AttentionLayer, cache: KeyValueCache, q: torch.Tensor, part: PaddedRequests) -> torch.Tensor:
    requests, query = part.token_rows.shape
    key_positions = torch.arange(part.pages.shape[1] * cache.k.shape[1], device=q.device)
    exists = key_positions < part.lengths[:, None]  # [requests, keys]
    if isinstance(part.visible, KeysFrom):
        exists = exists & (key_positions >= part.visible.starts[:, None])
    k, v, is_finite = cache.codec.decode({name: _flat(own, part) for name, own in cache.parts.items()}, q.dtype)
    # A query that sees a bad token gets NaN by the mask; keys and values of 0 let the token touch no other query.
    is_read = exists & is_finite
    keys, values = (tail_zeroed(own, is_read).transpose(1, 2) for own in (k, v))  # [requests, kv heads, keys, dim]
    seen = visible_keys(layer.mask, layer.window, layer.is_chunked, part.marks, key_positions, layer.reach)
    seen = seen & exists[:, None, :]
    queries = q[part.token_rows].transpose(1, 2)  # [requests, heads, query, dim]
    mask = torch.where(seen, torch.where(is_finite, 0.0, torch.nan)[:, None], -torch.inf)[:, None].to(q.dtype)
    out = masked_attention(queries, keys, values, mask, layer.scale, layer.softcap, layer.sinks)
    return out.transpose(1, 2).reshape(requests * query, layer.num_heads * layer.head_dim)


def _flat(cache: torch.Tensor, part: PaddedRequests) -> torch.Tensor:
    """Gather the pages of each request from a cache [pages, page tokens, ..]: [requests, keys, ..]."""
    requests, columns = part.pages.shape
    return cache[part.pages].reshape(requests, columns * cache.shape[1], *cache.shape[2:])


def tail_zeroed(gathered: torch.Tensor, is_read: torch.Tensor) -> torch.Tensor:
    """Return keys or values [requests, keys, kv heads, dim], with zeros in place of keys that no query reads."""
    zero = torch.zeros((), dtype=gathered.dtype, device=gathered.device)
    return torch.where(is_read[..., None, None], gathered, zero)


def masked_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float,
                     softcap: float | None, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """Attend with q [.., heads, query, dim] to k and v [.., kv heads, keys, dim]. mask: added to the scores,
    broadcastable to [.., heads, query, keys]. sinks [heads]: the score of one more key, whose value is 0."""
    group = q.shape[-3] // k.shape[-3]
    if group > 1:
        k, v = k.repeat_interleave(group, dim=-3), v.repeat_interleave(group, dim=-3)
    if softcap is None and sinks is None:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    scores = q @ k.transpose(-1, -2) * (scale if softcap is None else scale / softcap)
    scores = (scores if softcap is None else torch.tanh(scores) * softcap) + mask
    if sinks is not None:
        sink = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        weights = torch.softmax(torch.cat((scores, sink), dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    return weights.to(v.dtype) @ v
