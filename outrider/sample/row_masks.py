"""RowMasks: masks of the tokens that features allow in the logit rows of a step, with a bit for each token of the
vocabulary.

A feature writes the masks of its rows between forward and finish of every step in which they sample (`HostTurn`). Their
memory, rows x tokens of a run x vocabulary bits, is allocated for the first request with masks. It never moves, because
captured steps hold its address.
"""

from __future__ import annotations

import logging

import numpy as np
import torch

from outrider.core import Admission, Axis, Limits
from outrider.kernels.buffers import buffer, send, to_device

log = logging.getLogger("outrider")


class RowMasks:
    def __init__(self, limits: Limits, device: torch.device) -> None:
        self._limits, self._device = limits, device
        self.words: torch.Tensor | None = None  # [rows, run, mask words] int32; None: no request has asked yet

    @property
    def num_words(self) -> int:
        """The number of 32-bit words in one mask."""
        return self._limits.extent(Axis.MASK_WORDS)

    def admit(self, admissions: list[Admission]) -> None:
        if self.words is None and any(a.request.is_masked for a in admissions):
            axes = Axis.ROWS, Axis.RUN, Axis.MASK_WORDS
            with torch.inference_mode(False):  # like all row state, which is made before any step
                self.words = buffer(self._limits, *axes, dtype=torch.int32, device=self._device)
            log.info("masks of allowed tokens take %.0f MiB for all rows", self.words.nbytes / 2**20)

    def write(self, cells: list[int], words: np.ndarray) -> None:
        """Write masks [cells, mask words] into these cells. Cell r * run + j has the mask of row r after j drafts."""
        assert self.words is not None, "a row with masks was not admitted"
        flat = self.words.view(-1, self.words.shape[2])
        flat.index_copy_(0, to_device(cells, torch.int64, self._device), send(torch.from_numpy(words), self._device))
