"""RowState: the device's state of every running request, indexed by row.

Only the device has the exact lengths, tokens and drafts. While steps are in flight, the host knows the lengths of the
last settled step and upper bounds. The host writes rows at admission and page tables as pages are granted, and reads
only the results of steps."""

from __future__ import annotations

import torch

from outrider.cache.groups import Group
from outrider.core import (
    NULL_PAGE,
    NULL_ROW,
    Admission,
    Axis,
    HiddenReport,
    HostDraft,
    Limits,
    PageWrite,
    ScheduledBatch,
)
from outrider.core.params import SamplingParams
from outrider.kernels.buffers import buffer, send, to_device
from outrider.runner.row_inputs import RowInputs
from outrider.sample.sampling_rows import SamplingRows


class RowParams:
    """The host's copy of the parameters of each row's request: sampling parameters, inputs and reports. The host plans
    steps with it. The entry of a released row stays until the row is admitted again; no batch uses the row before that.
    """

    def __init__(self, inputs: RowInputs | None = None) -> None:
        self._by_row = {NULL_ROW: SamplingParams(temperature=0)}
        self._not_plain: set[int] = set()
        self._masked: set[int] = set()
        self._num_logprobs: dict[int, int] = {}  # by row that reports any
        self._prompt_lens: dict[int, int] = {}  # by row that reports log-probabilities of its prompt
        self.inputs = inputs or RowInputs()
        self._hidden: dict[int, tuple[HiddenReport, int]] = {}  # by row that reports hidden states: report, length

    def admit(self, admissions: list[Admission]) -> None:
        for admission in admissions:
            row, params = admission.row, admission.params
            self._by_row[row] = params
            is_plain = params.is_plain and admission.request.generates and not admission.request.is_masked
            (self._not_plain.discard if is_plain else self._not_plain.add)(row)
            (self._masked.add if admission.request.is_masked else self._masked.discard)(row)
            self._num_logprobs.pop(row, None)
            if (num_reported := params.num_reported) is not None:
                self._num_logprobs[row] = num_reported
            self._prompt_lens.pop(row, None)
            if params.prompt_logprobs is not None:
                self._prompt_lens[row] = admission.prompt_len
            self.inputs.admit(admission)
            self._hidden.pop(row, None)
            if not admission.request.generates:
                self._hidden[row] = (admission.request.hidden, admission.max_len)

    def of_rows(self, rows: list[int]) -> list[SamplingParams]:
        return [self._by_row[row] for row in rows]

    def reported(self, rows: list[int]) -> list[SamplingParams]:
        """Return the sampling parameters of all rows if any row reports log-probabilities, otherwise an empty list."""
        asks = not (self._num_logprobs.keys().isdisjoint(rows) and self._prompt_lens.keys().isdisjoint(rows))
        return self.of_rows(rows) if asks else []

    def are_plain(self, rows: list[int]) -> bool:
        """Whether all rows generate tokens by a plain draw, greedily or at a temperature, without any other parameter.
        """
        return self._not_plain.isdisjoint(rows)

    def any_masks(self, rows: list[int], logit_counts: list[int]) -> bool:
        """Whether a feature masks the tokens of any row that has logit rows. logit_counts: the number of logit rows of
        each row."""
        if self._masked.isdisjoint(rows):
            return False
        return any(count > 0 and row in self._masked for row, count in zip(rows, logit_counts, strict=True))

    def logprobs_of(self, rows: list[int]) -> list[int]:
        """Return how many log-probabilities each of these rows asks for; rows that ask for none are left out."""
        found = self._num_logprobs
        return [] if found.keys().isdisjoint(rows) else [found[row] for row in rows if row in found]

    def hidden_of(self, rows: list[int]) -> dict[int, tuple[HiddenReport, int]]:
        """Return, by row, the report of hidden states that a row asks for and the row's final length. Rows that ask for
        none are left out."""
        found = self._hidden
        return {} if found.keys().isdisjoint(rows) else {row: found[row] for row in rows if row in found}

    def reported_rows(self, batch: ScheduledBatch) -> list[int]:
        """Return the number of log-probability rows that the step reports on each request's prompt. A request has a row
        for each of its known tokens if the first of them belongs to the prompt. Computed from the batch's length
        bounds, which are exact while a prompt is being computed."""
        parts = zip(batch.rows, batch.bounds, batch.num_known, batch.num_drafts, strict=True)
        return [known if bound - known - drafts < self._prompt_lens.get(row, 0) else 0
                for row, bound, known, drafts in parts]

    def report_prompts(self, batch: ScheduledBatch) -> bool:
        """Whether the step computes tokens of a prompt whose log-probabilities are reported."""
        return not self._prompt_lens.keys().isdisjoint(batch.rows) and any(self.reported_rows(batch))


class RowState:
    def __init__(self, limits: Limits, groups: tuple[Group, ...], device: torch.device) -> None:
        def rows(*axes: Axis, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return buffer(limits, Axis.ROWS, *axes, dtype=dtype, device=device)

        self.limits, self.device = limits, device
        self.tokens = rows(Axis.LENGTH)  # known tokens of each row
        self.known = rows()
        self.computed = rows()
        self.alive = rows(dtype=torch.bool)
        self.drafts = rows(Axis.DRAFTS)
        self.num_drafts = rows()
        self.levels = rows()  # how sure the drafter is of the row's drafts
        self.sampling = SamplingRows(limits, device)
        self.params = RowParams()
        self.page_tables = [
            torch.zeros(self.known.shape[0], group.kind.capacity(limits).table_width, dtype=torch.int32, device=device)
            for group in groups
        ]

    def reset(self) -> None:
        """Release all rows. Until a row is admitted again it has no tokens and its page table is null, even if a step
        names it."""
        for tensor in (*self.page_tables, self.known, self.computed, self.alive, self.num_drafts):
            tensor.zero_()
        self.sampling.lists.reset()
        self.params = RowParams(RowInputs(self.params.inputs.encoders))

    def admit(self, admissions: list[Admission]) -> None:
        """Write the admitted requests into their rows. A row's page table stays null until `write_pages`, so that a row
        whose admission fails midway cannot reach the pages of its last request."""
        if not admissions:
            return
        cells: list[torch.Tensor] = []  # indices of the admitted tokens in `self.tokens`
        tokens: list[int] = []
        for admission in admissions:
            start = admission.row * self.tokens.shape[1]
            cells.append(torch.arange(start, start + admission.num_known))
            tokens += admission.token_ids
        self.tokens.view(-1).index_copy_(0, send(torch.cat(cells), self.device),
                                         to_device(tokens, torch.int64, self.device))
        fields = to_device([[a.row, a.num_known, a.computed] for a in admissions], torch.int64, self.device)
        rows, known, computed = fields.unbind(1)
        for table in self.page_tables:
            table.index_fill_(0, rows, NULL_PAGE)
        self.known.index_copy_(0, rows, known)
        self.computed.index_copy_(0, rows, computed)
        self.num_drafts.index_fill_(0, rows, 0)
        self.alive.index_fill_(0, rows, True)
        self.sampling.admit(admissions)
        self.params.admit(admissions)

    def write_pages(self, writes: list[PageWrite]) -> None:
        """Write the page tables. If a cell is written several times, the last write wins; the host resolves this first,
        because one indexed write has no order. Requests that share long prefixes write tens of thousands of cells, so
        the lists are joined without a loop over cells."""
        by_row: list[dict[int, list[PageWrite]]] = [{} for _ in self.page_tables]
        for write in writes:
            by_row[write.group].setdefault(write.row, []).append(write)
        for table, group in zip(self.page_tables, by_row, strict=True):
            rows: list[int] = []
            columns: list[int] = []
            pages: list[int] = []
            for row, own in group.items():
                before = len(columns)
                _add_cells(own, columns, pages)
                rows += [row] * (len(columns) - before)
            if rows:
                row_index, column, page = to_device(rows + columns + pages, torch.int64, self.device).view(3, -1)
                table.index_put_((row_index, column), page.to(torch.int32))

    def take_host_drafts(self, drafts: list[HostDraft], *, keeps_longer: bool = False) -> None:
        """Store the host's drafts in the rows. Their first tokens are left out if those have been accepted meanwhile.
        keeps_longer: keep the device drafter's drafts where they begin with the host's."""
        if not drafts:
            return
        width = self.drafts.shape[1]
        most = max(len(draft.token_ids) for draft in drafts)
        packed = to_device(
            [[d.row, d.after, len(d.token_ids), *d.token_ids, *[0] * (most - len(d.token_ids))] for d in drafts],
            torch.int64, self.device,
        )
        rows, after, count, guessed = packed[:, 0], packed[:, 1], packed[:, 2], packed[:, 3:]
        since = self.known[rows] - after  # tokens that became known meanwhile
        index = torch.arange(most, device=self.device)
        columns = (after[:, None] + index).clamp_max(self.tokens.shape[1] - 1)
        agrees = (guessed == self.tokens[rows[:, None], columns]) | (index >= since[:, None])
        is_alive = agrees.all(dim=1) & (since >= 0)
        shifted = guessed.gather(1, (since[:, None] + torch.arange(width, device=self.device)).clamp(0, most - 1))
        left = torch.where(is_alive, count - since, 0).clamp(0, width)
        if keeps_longer:
            differs = (shifted != self.drafts[rows]) & (torch.arange(width, device=self.device) < left[:, None])
            left = torch.where(differs.any(dim=1) | (self.num_drafts[rows] < left), left, 0)
        # Where nothing is left of it, a device drafter's guess stays.
        self.drafts.index_copy_(0, rows, torch.where((left > 0)[:, None], shifted, self.drafts[rows]))
        self.num_drafts.index_copy_(0, rows, torch.where(left > 0, left, self.num_drafts[rows]))
        self.levels.index_copy_(0, rows, torch.where(left > 0, 0, self.levels[rows]))


def _add_cells(writes: list[PageWrite], columns: list[int], pages: list[int]) -> None:
    """Add the page table columns that the writes of one row change, with their pages. Each column is added once, with
    the page that was written last."""
    ends = 0
    for write in writes:
        if write.start < ends:  # a cell is written twice
            folded = {write.start + i: page for write in writes for i, page in enumerate(write.pages)}
            columns += folded.keys()
            pages += folded.values()
            return
        ends = write.start + len(write.pages)
    for write in writes:
        columns += range(write.start, write.start + len(write.pages))
        pages += write.pages
