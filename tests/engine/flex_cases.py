"""Ragged batches over scattered pages, with spans and dead tokens, for tests of attention with masks."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

import torch

from outrider.cache.groups import CacheLayout, LayerCache, plan_groups
from outrider.cache.kinds import FullSpec, SlidingSpec
from outrider.mixers.batch import BatchView, ExactQueries, ExtraKeys, LengthBound
from outrider.mixers.paged.backend import AttentionLayer
from outrider.mixers.pool import DevicePool
from tests.engine.masks import ChunkedMask, DocumentMask

CPU = torch.device("cpu")
HEADS, KV_HEADS, DIM, WINDOW = 4, 2, 16, 21
FEW_PAGES = 32  # without a compiler flex attention takes time by the whole pool, not by what is read of it


def layout_of(page_tokens: int, itemsize: int = 8) -> CacheLayout:
    geometry = (KV_HEADS, DIM, itemsize)
    return plan_groups([LayerCache(0, FullSpec(*geometry)), LayerCache(1, SlidingSpec(*geometry, WINDOW))], page_tokens)


@dataclass(frozen=True)
class Member:
    computed: int
    scheduled: int
    live: int
    span: tuple[int, int] = (0, 0)


class Case:
    """Requests over scattered pages of a pool in which everything else is NaN."""

    def __init__(self, members: list[Member], page_tokens: int, max_len: int, seed: int, *, extra: int = 0,
                 dtype: torch.dtype = torch.float64) -> None:
        self.members, self.layout = members, layout_of(page_tokens, dtype.itemsize)
        columns = -(-max_len // page_tokens)
        num_pages = 1 + len(self.layout.groups) * len(members) * columns
        generator = torch.Generator().manual_seed(seed)
        pages = 1 + torch.randperm(num_pages - 1, generator=generator)
        padded = len(members) + extra
        tables = torch.zeros(len(self.layout.groups), padded, columns, dtype=torch.int64)
        tables[:, : len(members)] = pages.view(len(self.layout.groups), len(members), columns)
        self.pool = DevicePool(self.layout, num_pages, dtype, CPU)
        self.pool.poison(torch.arange(num_pages))
        lens = [m.scheduled for m in members] + [0] * extra
        starts = torch.tensor([0, *itertools.accumulate(lens)])
        live = torch.tensor([m.live for m in members] + [0] * extra)
        lengths = torch.tensor([m.computed + m.live if m.live else 0 for m in members] + [0] * extra)
        of = torch.tensor([i for i, n in enumerate(lens) for _ in range(n)])
        offset = torch.arange(len(of)) - starts[of]
        computed = torch.tensor([m.computed for m in members])
        positions = (computed[of] + offset).clamp(max=max_len - 1)
        slots = []
        for group in self.layout.groups:
            cells = tables[group.index][of, positions // group.page_tokens] * group.page_tokens
            slots.append(torch.where(offset < live[of], cells + positions % group.page_tokens, -1))
        spans = torch.tensor([members[i].span for i in of])
        inside = (positions >= spans[:, 0]) & (positions < spans[:, 1])
        self.view = BatchView(
            num_requests=padded, num_tokens=len(of), queries=ExactQueries(tuple(lens)),
            max_length=LengthBound(max(1, int(lengths.max()))), rows=torch.arange(padded), query_starts=starts,
            lengths=lengths, live=live, query_starts_int32=starts.int(), lengths_int32=lengths.int(),
            live_int32=live.int(), token_ids=torch.zeros_like(of), positions=positions, request_of=of,
            page_tables=tuple(tables), token_slots=tuple(slots),
            extra_keys=ExtraKeys(spans[:, 0] * inside, spans[:, 1] * inside),
        )
        self.fill(generator)

    def fill(self, generator: torch.Generator) -> None:
        """What earlier steps computed."""
        for layer in range(2):
            parts, (group,) = self.pool.layer(layer), self.layout.groups_of(layer)
            for request, member in enumerate(self.members):
                cells = torch.arange(member.computed)
                pages = self.view.page_tables[group.index][request, cells // group.page_tokens]
                for part in parts.values():
                    shape = (member.computed, KV_HEADS, DIM)
                    values = torch.randn(shape, dtype=torch.float64, generator=generator)
                    part[pages, cells % group.page_tokens] = values.to(part.dtype)

    def layer(self, index: int, **fields: Any) -> AttentionLayer:
        return AttentionLayer(index, HEADS, KV_HEADS, DIM, DIM**-0.5, WINDOW if index else None, **fields)

    def visible(self, layer: AttentionLayer, token: int) -> set[int]:
        """Positions that a token row sees, by the rules and one at a time."""
        request = int(self.view.request_of[token])
        if token - int(self.view.query_starts[request]) >= self.members[request].live:
            return set()
        query = int(self.view.positions[token])
        first, last = self.members[request].span
        in_span = first <= query < last
        seen = set()
        for key in range(int(self.view.lengths[request])):
            allowed = key <= query and (layer.window is None or key > query - layer.window)
            if isinstance(layer.mask, ChunkedMask):
                allowed = allowed and key // layer.mask.chunk == query // layer.mask.chunk
            if isinstance(layer.mask, DocumentMask) and in_span:
                allowed = allowed and key >= first
            if allowed or (in_span and first <= key < last):
                seen.add(key)
        return seen


def random_case(seed: int, page_tokens: int, *, spans: bool = True, dtype: torch.dtype = torch.float64) -> Case:
    draw = random.Random(seed)
    members = []
    for _ in range(draw.randint(1, 5)):
        if draw.random() < 0.5:  # verifying
            scheduled = draw.randint(1, 4)
            members.append(Member(draw.randint(0, 90), scheduled, draw.randint(0, scheduled)))
        else:
            computed, scheduled = draw.choice([0, 16, 33]), draw.randint(17, 150)
            first = computed + draw.randint(0, scheduled - 2)
            last = draw.randint(first + 1, computed + scheduled)
            members.append(Member(computed, scheduled, scheduled, (first, last) if spans else (0, 0)))
    return Case(members, page_tokens, 192, seed, extra=draw.randint(0, 2), dtype=dtype)
