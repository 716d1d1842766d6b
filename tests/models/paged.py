"""A model over real pages without an engine: ragged batches of several requests, padded, with dead tokens.

Free pages and the null page are poisoned with NaN, and every request's pages lie scattered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.cache.groups import plan_groups
from outrider.layers import StepContext
from outrider.mixers.batch import BatchView, ExactQueries, LengthBound
from outrider.mixers.cached import CachedLayers
from outrider.mixers.paged.torch_backend import TorchBackend
from outrider.mixers.pool import DevicePool
from outrider.models.base import Hidden, Model
from tests.models.oracle import LOGIT_ROWS

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Piece:
    """A request's part of a batch."""

    request: int
    tokens: list[int]
    num_dead: int = 0  # token rows after them that are scheduled and not live


class PagedModel:
    """`forward` appends to its requests. `PagedModel.truncate` forgets tokens, as a rejection does."""

    def __init__(self, model: Model, *, max_requests: int = 8, max_len: int = 128, page_tokens: int = 16) -> None:
        self.model = model
        layout = plan_groups(model.cache_layers(), page_tokens)
        columns = -(-max_len // page_tokens)
        num_groups = len(layout.groups)
        num_pages = 1 + max_requests * columns * num_groups
        self.pool = DevicePool(layout, num_pages, model.dtype, CPU)
        self.pool.poison(torch.arange(num_pages))
        pages = 1 + torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(0))
        self.tables = pages.view(num_groups, max_requests, columns).unbind()
        self.cached = CachedLayers(model.attention_layers, self.pool, TorchBackend())
        self.lengths = [0] * max_requests

    def truncate(self, request: int, length: int) -> None:
        self.lengths[request] = length

    def view(self, pieces: Sequence[Piece], *, requests: int = 0, tokens: int = 0) -> BatchView:
        """`requests`, `tokens`: what the batch is padded to."""
        extra = max(0, requests - len(pieces))
        lens = [len(piece.tokens) + piece.num_dead for piece in pieces] + [0] * extra
        starts = torch.tensor([0, *lens]).cumsum(0)
        rows = [piece.request for piece in pieces]
        begin = torch.tensor([self.lengths[row] for row in rows] + [0] * extra)
        live = torch.tensor([len(piece.tokens) for piece in pieces] + [0] * extra)
        request_of = torch.tensor([r for r, n in enumerate(lens) for _ in range(n)])
        padding = max(0, tokens - len(request_of))
        offset = torch.arange(len(request_of)) - starts[request_of]
        is_live = torch.cat((offset < live[request_of], torch.zeros(padding, dtype=torch.bool)))
        positions = torch.cat((begin[request_of] + torch.minimum(offset, live[request_of] - 1), torch.zeros(padding)))
        positions = positions.long()
        request_of = torch.cat((request_of, torch.full((padding,), len(lens) - 1)))
        token_ids = [t for piece in pieces for t in [*piece.tokens, *[0] * piece.num_dead]] + [0] * padding
        tables, slots = [], []
        for table, group in zip(self.tables, self.pool.layout.groups, strict=True):
            own = torch.cat((table[rows], torch.zeros(extra, table.shape[1], dtype=torch.int64)))
            size = group.page_tokens
            tables.append(own)
            slots.append(torch.where(is_live, own[request_of, positions // size] * size + positions % size, -1))
        lengths = torch.where(live > 0, begin + live, 0)
        return BatchView(
            num_requests=len(lens), num_tokens=len(token_ids), queries=ExactQueries(tuple(lens)),
            max_length=LengthBound(int(lengths.max())), rows=torch.tensor(rows + [0] * extra), query_starts=starts,
            lengths=lengths, live=live, query_starts_int32=starts.int(), lengths_int32=lengths.int(),
            live_int32=live.int(), token_ids=torch.tensor(token_ids), positions=positions, request_of=request_of,
            page_tables=tuple(tables), token_slots=tuple(slots),
        )

    def forward(self, pieces: Sequence[Piece], **padding: int) -> Hidden:
        view = self.view(pieces, **padding)
        self.bound = self.cached.bind(view)
        hidden = self.model.forward(view.token_ids, StepContext(self.bound, view.positions))
        for piece in pieces:
            self.lengths[piece.request] += len(piece.tokens)
        return hidden

    def logits(self, pieces: Sequence[Piece], **padding: int) -> list[torch.Tensor]:
        """The logits of every live token, piece by piece."""
        logits, row, found = self.model.logits(self.forward(pieces, **padding).final, LOGIT_ROWS), 0, []
        for piece in pieces:
            found.append(logits[row : row + len(piece.tokens)])
            row += len(piece.tokens) + piece.num_dead
        return found
