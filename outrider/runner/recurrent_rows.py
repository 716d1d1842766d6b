"""RecurrentRows: what every row keeps of the recurrent layers, from admission to the row's last fold.

A row has a state, a conv tail and a window per layer, and a count of accepted drafts that wait in the window. Nothing
but the window grows with the number of drafts, and nothing is a page. A model without such layers has an empty one.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from outrider.cache.kinds import RecurrentKind, RecurrentSpec
from outrider.core import NULL_PAGE, Admission, Axis, CheckpointWrite, Limits, ScheduledBatch
from outrider.kernels.buffers import buffer, to_device
from outrider.kernels.recurrent import SHORT_RUN
from outrider.mixers.batch import DecodeQueries, ExactQueries, Queries
from outrider.mixers.pool import DevicePool
from outrider.mixers.recurrent.base import RecurrentMixer
from outrider.mixers.recurrent.checkpoint_pages import CheckpointPages, state_dtype
from outrider.mixers.recurrent.layers import (
    LayerRows,
    RecurrentLayers,
    RecurrentStep,
    StepCounts,
    Targets,
)
from outrider.runner.batch import CapturedShape, Inputs


class RecurrentRows:
    def __init__(self, mixers: Mapping[int, RecurrentMixer], limits: Limits, pool: DevicePool) -> None:
        kind: RecurrentKind = pool.layout.recurrent
        if {layer: mixer.spec for layer, mixer in mixers.items()} != dict(kind.layers):
            raise ValueError("the model's recurrent layers are not those of the cache layout")
        device = pool.data.device
        self.device = device
        self.layers = {layer: _layer_rows(spec, limits, pool.dtype, device) for layer, spec in kind.layers}
        self.pending = buffer(limits, Axis.ROWS, dtype=torch.int64, device=device)
        # Pages of the checkpoint that a row was last given: where captured steps find them.
        num_pages = kind.capacity(limits).checkpoint_pages
        self._target_pages = torch.zeros(limits.extent(Axis.ROWS), num_pages, dtype=torch.int64, device=device)
        self._listed: dict[int, int] = {}  # by row: the checkpoint whose pages those are
        self.pages = CheckpointPages(kind, pool.data, pool.dtype)
        self.backend = RecurrentLayers(mixers, self.layers, self.pages)

    @property
    def num_bytes(self) -> int:
        tensors = [t for rows in self.layers.values() for t in (rows.state, rows.tail, rows.conv_in, *rows.gates)]
        return sum(t.numel() * t.element_size() for t in tensors)

    def no_targets(self, count: int) -> Targets | None:
        """Checkpoints of the null row that no step reaches, one for each of its requests."""
        none = torch.zeros(count, dtype=torch.int64, device=self.device)
        return self._listed_targets(none, none - 1) if self.layers else None

    def warm_up(self) -> None:
        """Compiles the kernels that fold rows which ended; the others are those of steps."""
        targets = self.no_targets(1)
        if targets is not None and self.backend.use_kernels:
            none = torch.zeros(1, dtype=torch.int64, device=self.device)
            self.backend.fold_ended(none, none, none, targets)

    @property
    def needs_no_counts(self) -> bool:
        """Whether a step's runs may be of lengths that only the device knows: scans in torch go by the host's."""
        return not self.layers or self.backend.use_kernels

    # Before a step

    def fold(self, folds: list[CheckpointWrite], computed: torch.Tensor) -> torch.Tensor | None:
        """Rows that ended with accepted drafts pending reach their last boundary; before anyone else has them.
        computed [ROWS]. Returns whether each did [folds]."""
        if not folds:
            return None
        rows = to_device([fold.row for fold in folds], torch.int64, self.device)
        targets = self._targets(folds, list(range(len(folds))), [-1] * len(folds))
        computed, pending = computed[rows], self.pending[rows]
        self.backend.fold_ended(rows, computed, pending, targets)
        return (targets.boundary > computed - pending) & (targets.boundary <= computed)

    def admit(self, admissions: list[Admission]) -> None:
        """Rows begin from nothing, or from a checkpoint."""
        if not admissions or not self.layers:
            return
        rows = to_device([a.row for a in admissions], torch.int64, self.device)
        self.pending.index_fill_(0, rows, 0)
        restored = [a for a in admissions if a.checkpoint]
        restored_rows = to_device([a.row for a in restored], torch.int64, self.device)
        pages = to_device([a.checkpoint for a in restored], torch.int64, self.device)
        for layer, own in self.layers.items():
            for tensor in (own.state, own.tail):
                tensor.index_fill_(0, rows, 0)
            if restored:
                state, tail = self.pages.read(layer, pages)
                own.state.index_copy_(0, restored_rows, state)
                own.tail.index_copy_(0, restored_rows, tail)

    def targets(self, scheduled: ScheduledBatch) -> Targets | None:
        """Checkpoints of the batch's rows."""
        if not scheduled.checkpoints:
            return None
        index_of = {row: i for i, row in enumerate(scheduled.rows)}
        requests = [index_of[write.row] for write in scheduled.checkpoints]
        known, drafts = scheduled.num_known, scheduled.num_drafts
        # Where a request's tokens are scanned, boundaries are given by offsets: right only if the bound is exact.
        starts = [scheduled.bounds[i] - known[i] - drafts[i] if known[i] > SHORT_RUN else -1 for i in requests]
        return self._targets(scheduled.checkpoints, requests, starts)

    def list_pages(self, writes: list[CheckpointWrite]) -> None:
        """Tells rows the pages of the checkpoints they may write; a row that has several needs `targets`."""
        fresh = {write.row: write for write in writes if self._listed.get(write.row) != write.id}
        if not fresh:
            return
        rows = to_device(list(fresh), torch.int64, self.device)
        pages = to_device([write.pages for write in fresh.values()], torch.int64, self.device)
        self._target_pages.index_copy_(0, rows, pages)
        self._listed |= {row: write.id for row, write in fresh.items()}

    # In a step

    def begin(self, inputs: Inputs, targets: Targets | None) -> RecurrentStep | None:
        """What `attend.recurrent` calls in this step; None if nothing will."""
        if not self.layers:
            return None
        shape, view = inputs.shape, inputs.batch.padded
        if isinstance(shape, CapturedShape) and shape.takes_checkpoints:
            assert targets is None
            targets = self._listed_targets(view.rows, inputs.boundaries)
        return self.backend.on(StepCounts(
            view.rows, view.query_starts, view.request_of, inputs.computed_before, inputs.num_known, inputs.num_drafts,
            self.pending[view.rows], _lens(shape.queries, shape.requests), _lens(shape.known, shape.requests),
            shape.max_drafts, shape.max_pending, targets,
        ))  # fmt: skip

    def commit(self, step: RecurrentStep | None, num_accepted: torch.Tensor) -> torch.Tensor | None:
        """What was accepted waits; who took no part keeps what waits already. num_accepted [requests]. Returns which
        checkpoints were written: [checkpoints], or [requests] where pages are listed by row."""
        if step is None:
            return None
        counts = step.counts
        self.pending.index_copy_(0, counts.rows, torch.where(counts.num_known > 0, num_accepted, counts.pending))
        return step.written

    def _listed_targets(self, rows: torch.Tensor, boundaries: torch.Tensor) -> Targets:
        """One per padded request, from what the device holds. Pages that a row was given once and has no more must not
        be touched."""
        count = rows.shape[0]
        index, none = torch.arange(count, device=self.device), torch.full_like(boundaries, -1)
        pages = torch.where(boundaries[:, None] >= 0, self._target_pages[rows], NULL_PAGE)
        return Targets(tuple(range(count)), (-1,) * count, index, boundaries, none, pages)

    def _targets(self, writes: list[CheckpointWrite], requests: list[int], starts: list[int]) -> Targets:
        boundaries = [write.boundary for write in writes]
        columns = to_device([requests, boundaries, starts], torch.int64, self.device)
        pages = to_device([write.pages for write in writes], torch.int64, self.device)
        offsets = tuple(boundary - start for boundary, start in zip(boundaries, starts, strict=True))
        request, boundary, start = columns.unbind(0)
        order = None
        if requests != sorted(requests):
            by_request = sorted(range(len(requests)), key=lambda target: requests[target])
            order = to_device(by_request, torch.int64, self.device)
        return Targets(tuple(requests), offsets, request, boundary, start, pages, order)


def _lens(queries: Queries, requests: int) -> tuple[int, ...]:
    """Tokens of each request; where only the device knows them, as many as there may be: a few, or, with prompts among
    them, more than go token by token."""
    match queries:
        case ExactQueries(lens):
            return lens
        case DecodeQueries(most):
            return (most,) * requests
        case _:
            return (SHORT_RUN + 1,) * requests


def _layer_rows(spec: RecurrentSpec, limits: Limits, dtype: torch.dtype, device: torch.device) -> LayerRows:
    def rows(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(limits.extent(Axis.ROWS), *shape, dtype=dtype, device=device)

    drafts = limits.extent(Axis.DRAFTS)
    return LayerRows(
        state=rows(*spec.state_shape, dtype=state_dtype(dtype)),
        tail=rows(spec.conv_width - 1, spec.conv_dim),
        conv_in=rows(drafts, spec.conv_dim),
        gates=tuple(rows(drafts, size) for size in spec.gate_sizes),
    )
