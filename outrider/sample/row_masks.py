"""RowMasks: masks of the tokens that features allow in the logit rows of a step, with a bit for each token of the
vocabulary.

A feature writes masks for its rows in every step that samples for them, between forward and finish (`HostTurn`). If
several features mask a row, only tokens that all of them allow are left. The memory (rows x tokens of a run x
vocabulary bits) is allocated for the first request with masks. It never moves, because captured steps hold its address.
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
        self._written: set[int] = set()  # cells that have a mask of this step

    @property
    def num_words(self) -> int:
        """The number of 32-bit words in one mask."""
        return self._limits.extent(Axis.MASK_WORDS)

    @property
    def num_bytes(self) -> int:
        """Bytes of the masks, whether or not they are allocated yet."""
        return 4 * self._limits.extent(Axis.ROWS) * self._limits.extent(Axis.RUN) * self.num_words

    def admit(self, admissions: list[Admission]) -> None:
        if self.words is None and any(a.request.is_masked for a in admissions):
            axes = Axis.ROWS, Axis.RUN, Axis.MASK_WORDS
            with torch.inference_mode(False):  # like all row state, which is made before any step
                self.words = buffer(self._limits, *axes, dtype=torch.int32, device=self._device)
            log.info("masks of allowed tokens take %.0f MiB for all rows", self.words.nbytes / 2**20)

    def begin_step(self) -> None:
        """Forget the masks of earlier steps. Called before features write those of a step."""
        self._written.clear()

    def write(self, cells: list[int], words: np.ndarray) -> None:
        """Write masks [cells, mask words] into these cells. Cell r * run + j has the mask of row r after j drafts. A
        cell that another feature has written in this step keeps only the tokens that both allow."""
        assert self.words is not None, "a row with masks was not admitted"
        flat, index = self.words.view(-1, self.words.shape[2]), to_device(cells, torch.int64, self._device)
        own = send(torch.from_numpy(words), self._device)
        if not self._written.isdisjoint(cells):
            is_first = to_device([0 if cell in self._written else -1 for cell in cells], torch.int32, self._device)
            own = own & (flat.index_select(0, index) | is_first[:, None])
        flat.index_copy_(0, index, own)
        self._written.update(cells)
