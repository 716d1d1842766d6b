"""RecurrentRows: the recurrent state of every row, from admission to the row's last fold.

A row has a state, a conv tail and a window per layer, and a count of accepted drafts that wait in the window. Only the
window grows with the number of drafts. None of this is stored in pages. A model without recurrent layers has no such
state."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from outrider.cache.kinds import RecurrentKind, RecurrentSpec
from outrider.core import NULL_PAGE, Admission, Axis, CheckpointWrite, Limits, ScheduledBatch
from outrider.core.lazy_exports import LateModule
from outrider.kernels import ops
from outrider.kernels.buffers import buffer, to_device
from outrider.kernels.recurrent import CheckpointTargets, ScanTarget
from outrider.mixers.batch import BatchView, DecodeQueries, ExactQueries, Queries
from outrider.mixers.pool import DevicePool
from outrider.mixers.recurrent.checkpoint_pages import CheckpointPages, RecurrentState, state_dtype
from outrider.mixers.recurrent.recurrent_mixer import (
    LayerRows,
    NoRecurrentStep,
    RecurrentBackend,
    RecurrentMixer,
    RecurrentStep,
    StepCounts,
)
from outrider.mixers.recurrent.torch_backend import TorchRecurrent, Walk

if TYPE_CHECKING:
    from outrider.mixers.recurrent import triton_backend
else:
    triton_backend = LateModule("outrider.mixers.recurrent.triton_backend")


class RecurrentRows:
    def __init__(self, mixers: Mapping[int, RecurrentMixer], limits: Limits, pool: DevicePool, *,
                 exact: bool = False, takes_checkpoints: bool = False) -> None:
        """takes_checkpoints: states are written to pages, from which requests with a common beginning start."""
        kind: RecurrentKind = pool.layout.recurrent
        self.takes_checkpoints = takes_checkpoints
        if {layer: mixer.spec for layer, mixer in mixers.items()} != dict(kind.layers):
            raise ValueError("the model's recurrent layers differ from those of the cache layout. This is a bug: "
                             "please report it")
        device = pool.data.device
        self.device = device
        self.layers = {layer: _layer_rows(spec, limits, pool.dtype, device) for layer, spec in kind.layers}
        self.pending = buffer(limits, Axis.ROWS, dtype=torch.int64, device=device)
        self.nothing = torch.zeros(0, dtype=torch.bool, device=device)  # no checkpoint was written
        # Pages of the checkpoint that a row was last given. Captured steps read them here.
        num_pages = kind.capacity(limits).checkpoint_pages
        self._row_pages = torch.zeros(limits.extent(Axis.ROWS), num_pages, dtype=torch.int64, device=device)
        self._row_checkpoint: dict[int, int] = {}  # row to the checkpoint whose pages those are
        self.pages = CheckpointPages(kind, pool.data, pool.dtype)
        self.backend = make_backend(mixers, self.layers, self.pages, exact=exact)

    @property
    def num_bytes(self) -> int:
        tensors = [t for rows in self.layers.values() for t in (rows.state, rows.tail, rows.conv_in, *rows.gates)]
        return sum(t.numel() * t.element_size() for t in tensors)

    def warm_up(self) -> None:
        """Compile the kernels that fold pending drafts of ended rows. All other kernels are compiled by running steps.
        """
        if self.layers and self.backend.finds_runs:
            null_row = torch.zeros(1, dtype=torch.int64, device=self.device)
            no_boundary = self.row_targets(null_row, null_row - 1)
            self.backend.fold_ended(null_row, null_row, null_row, no_boundary)

    @property
    def needs_no_counts(self) -> bool:
        """Whether steps can run if only the device knows the number of tokens of each request."""
        return not self.layers or self.backend.finds_runs

    # Before a step

    def reset(self) -> None:
        """Forget all rows: afterwards no row has an owner, drafts to fold or pages to write."""
        self.pending.zero_()
        self._row_pages.zero_()
        self._row_checkpoint.clear()

    def fold(self, folds: list[CheckpointWrite], computed: torch.Tensor) -> torch.Tensor:
        """Fold pending drafts of ended rows up to each row's last boundary, before other requests take the rows.
        computed [ROWS]. Returns whether each row reached its boundary [folds]."""
        if not folds:
            return self.nothing
        rows = to_device([fold.row for fold in folds], torch.int64, self.device)
        targets = self._make_targets(folds, list(range(len(folds))), len(folds))
        computed, pending = computed[rows], self.pending[rows]
        self.backend.fold_ended(rows, computed, pending, targets)
        return (targets.boundary > computed - pending) & (targets.boundary <= computed)

    def fold_pending(self) -> None:
        """Fold the pending drafts of all rows into their states, because the layers' weights are about to change. Done
        by the torch backend on any device, as it is rare."""
        if not self.layers:
            return
        rows = self.pending.nonzero()[:, 0]
        if not len(rows):
            return
        pending = self.pending[rows]
        for layer, mixer in self.backend.mixers.items():
            own = self.layers[layer]
            walk = Walk(mixer, RecurrentState(own.state[rows], own.tail[rows]), pending, None, exact=self.backend.exact)
            for j in range(own.conv_in.shape[1]):
                walk.step(own.conv_in[rows, j], tuple(gate[rows, j] for gate in own.gates), j < pending)
            own.state.index_copy_(0, rows, walk.state)
            own.tail.index_copy_(0, rows, walk.tail)
        self.pending.zero_()

    def admit(self, admissions: list[Admission]) -> None:
        """Set the states of admitted rows: to zero, or to a checkpoint's."""
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

    def targets(self, scheduled: ScheduledBatch, num_requests: int) -> CheckpointTargets | None:
        """Return the pages and boundaries of the batch's checkpoints, any number for each request. num_requests
        includes padded requests."""
        if not scheduled.cache.checkpoints:
            return None
        index_of = {row: i for i, row in enumerate(scheduled.rows)}
        requests = [index_of[write.row] for write in scheduled.cache.checkpoints]
        targets = self._make_targets(scheduled.cache.checkpoints, requests, num_requests)
        if self.backend.finds_runs:
            return targets
        # The host says where boundaries lie among scanned tokens, which is right only if its bound is exact.
        ends, known, drafts = scheduled.bounds, scheduled.num_known, scheduled.num_drafts
        return targets._replace(scans=tuple(
            ScanTarget(i, target, write.boundary - (ends[i] - known[i] - drafts[i]))
            for target, (i, write) in enumerate(zip(requests, scheduled.cache.checkpoints, strict=True))
            if known[i] >= self.backend.scan_from_tokens
        ))

    def give_pages(self, writes: list[CheckpointWrite]) -> None:
        """Write the pages of checkpoints to their rows, one checkpoint per row; a row with several needs `targets`."""
        fresh = {write.row: write for write in writes if self._row_checkpoint.get(write.row) != write.id}
        if not fresh:
            return
        rows = to_device(list(fresh), torch.int64, self.device)
        pages = to_device([write.pages for write in fresh.values()], torch.int64, self.device)
        self._row_pages.index_copy_(0, rows, pages)
        self._row_checkpoint |= {row: write.id for row, write in fresh.items()}

    # In a step

    def row_targets(self, rows: torch.Tensor, boundaries: torch.Tensor) -> CheckpointTargets:
        """Return one checkpoint target for each request, from device data: its boundary, or -1 for none, and the pages
        given to its row. A request without a boundary gets the null page, because its row's old pages may belong to
        other requests by now."""
        starts = torch.arange(rows.shape[0] + 1, device=self.device)
        pages = torch.where(boundaries[:, None] >= 0, self._row_pages[rows], NULL_PAGE)
        return CheckpointTargets(starts, starts[:-1], boundaries, pages)

    def begin(self, view: BatchView, computed: torch.Tensor, num_known: torch.Tensor, num_drafts: torch.Tensor, *,
              known: Queries, max_drafts: int, max_pending: int,
              targets: CheckpointTargets | None) -> RecurrentStep | NoRecurrentStep:
        """Begin a step of the recurrent layers, if the model has any. computed, num_known and num_drafts [requests] are
        counts of live tokens on the device; known: the host's information about the numbers of known tokens."""
        if not self.layers:
            return NoRecurrentStep()
        return self.backend.begin(StepCounts(
            view.rows, view.query_starts, view.request_of, computed, num_known, num_drafts, self.pending[view.rows],
            self._lens(view.queries, view.num_requests), self._lens(known, view.num_requests), max_drafts, max_pending,
            targets,
        ))

    def _lens(self, queries: Queries, requests: int) -> tuple[int, ...]:
        """Return the number of tokens of each request. If only the device knows the numbers, return upper bounds: a few
        tokens in a decode step, and enough for a scan in a step with prompts."""
        match queries:
            case ExactQueries(lens):
                return lens
            case DecodeQueries(most):
                return (most,) * requests
            case _:
                return (self.backend.scan_from_tokens,) * requests

    def commit(self, step: RecurrentStep | NoRecurrentStep, num_accepted: torch.Tensor) -> torch.Tensor:
        """Store the accepted drafts [requests] as pending. Returns which checkpoints were written [targets]."""
        step.keep_drafts(self.pending, num_accepted)
        return self.nothing if step.written is None else step.written

    def _make_targets(self, writes: list[CheckpointWrite], requests: list[int],
                      num_requests: int) -> CheckpointTargets:
        if requests != sorted(requests):
            raise ValueError("the checkpoints are not in the order of the batch's rows. This is a bug: please report "
                             "it")
        counts = [0] * num_requests
        for request in requests:
            counts[request] += 1
        starts = [0, *accumulate(counts)]
        ints = to_device([*starts, *requests, *(write.boundary for write in writes)], torch.int64, self.device)
        pages = to_device([write.pages for write in writes], torch.int64, self.device)
        first, request, boundary = ints.split((len(starts), len(writes), len(writes)))
        return CheckpointTargets(first, request, boundary, pages)


def make_backend(mixers: Mapping[int, RecurrentMixer], rows: Mapping[int, LayerRows], pages: CheckpointPages, *,
                 exact: bool) -> RecurrentBackend:
    """Choose Triton kernels on a GPU if they serve the dtype and all mixers, and if states begin at whole words of a
    checkpoint's pages; the torch backend otherwise. exact: a request's bits do not depend on its batch mates, nor on
    how its tokens are divided into steps."""
    starts_whole = all(start % 4 == 0 for start in (pages.page_bytes, *pages.starts.values()))
    on_gpu = pages.pool.device.type == "cuda" and pages.pool.dtype != torch.float64
    if (on_gpu and ops.has_triton() and starts_whole
            and all(mixers[layer].kernel_params() is not None for layer in rows)):
        return triton_backend.TritonRecurrent(mixers, rows, pages, exact=exact)
    return TorchRecurrent(mixers, rows, pages, exact=exact)


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
