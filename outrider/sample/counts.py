"""TokenCounts: counts for penalties. For each row and each token of the vocabulary: how often the token was generated,
and whether the prompt has it.

A row's counts are built from the prompt and the settled outputs when a request with penalties is admitted, also after a
preemption; then only accepted tokens change them. The memory, rows x vocabulary, is allocated when the first request
asks for a penalty.
"""

from __future__ import annotations

import logging

import torch

from outrider.core import Admission, Axis, Limits
from outrider.kernels import ops
from outrider.kernels.buffers import buffer, send
from outrider.kernels.sampling_flags import IN_PROMPT
from outrider.kernels.sampling_keys import CountTable

log = logging.getLogger("outrider")


class TokenCounts:
    def __init__(self, limits: Limits, device: torch.device) -> None:
        self._limits, self._device = limits, device
        self.packed: torch.Tensor | None = None  # [rows, vocabulary] int32: IN_PROMPT | outputs; None: not asked for
        self._address = torch.zeros(1, dtype=torch.int64, device=device)

    @property
    def table(self) -> CountTable:
        return CountTable(self.packed, self._address, self._limits.extent(Axis.VOCAB))

    @property
    def num_bytes(self) -> int:
        """Bytes of the token counts, whether or not they are allocated yet."""
        return 4 * self._limits.extent(Axis.ROWS) * self._limits.extent(Axis.VOCAB)

    def admit(self, admissions: list[Admission]) -> None:
        asking = [a for a in admissions if a.params.has_penalties]
        if not asking:
            return
        if self.packed is None:
            log.info("penalties: token counts of all rows take %.0f MiB", self.num_bytes / 2**20)
            with torch.inference_mode(False):  # like all row state, which is made before any step
                self.packed = buffer(self._limits, Axis.ROWS, Axis.VOCAB, dtype=torch.int32, device=self._device)
            self._address.fill_(self.packed.data_ptr())
        prompts, outputs = [], []
        for a in asking:
            cells = torch.tensor(a.token_ids) + a.row * self._limits.vocab_size
            prompts.append(cells[: a.prompt_len])
            outputs.append(cells[a.prompt_len :])
        prompt, output, row = (send(cells, self._device) for cells in (
            torch.cat(prompts), torch.cat(outputs), torch.tensor([a.row for a in asking])))
        self.packed.index_fill_(0, row, 0)
        flat = self.packed.view(-1)
        flat.index_fill_(0, prompt, IN_PROMPT)
        flat.index_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def add_runs(self, row: torch.Tensor, run: torch.Tensor, run_len: torch.Tensor) -> None:
        """Add the tokens run[i, :run_len[i]] to the counts of row[i]. Once the memory is allocated, rows without
        penalties are counted too. Their counts are not read, and are rebuilt when a request with penalties is admitted.
        """
        ops.count_runs(row, run, run_len, self.table)
