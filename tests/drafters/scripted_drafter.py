"""ScriptedDrafter: replays a continuation that is known to be right, with errors at chosen places.

So every pattern of acceptance can be reached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from outrider.core import Admission, Axis, Limits
from outrider.drafters.base import Drafter, Drafts, Step
from outrider.kernels.buffers import buffer
from outrider.mixers import CachedLayers

Script = Callable[[tuple[int, ...], int], Sequence[int]]


class ScriptedDrafter(Drafter):
    """`script(prompt, sample_index)` gives the tokens to draft after the prompt, wrong where errors are wanted."""

    name = "scripted"

    def __init__(self, max_drafts: int, script: Script, count: Callable[[int], int] | None = None) -> None:
        self.max_drafts = max_drafts
        self._script = script
        self._count = count or (lambda position: max_drafts)  # drafts to offer at a known length

    def bind(self, cached: CachedLayers, limits: Limits, device: torch.device) -> None:
        self._lines = buffer(limits, Axis.ROWS, Axis.LENGTH, dtype=torch.int64, device=device)
        self._ends = buffer(limits, Axis.ROWS, dtype=torch.int64, device=device)
        counts = [self._count(position) for position in range(limits.max_len)]
        self._counts = torch.tensor(counts, dtype=torch.int64, device=device).clamp(0, self.max_drafts)

    def admit(self, admissions: list[Admission]) -> None:
        for admission in admissions:
            prompt = tuple(admission.token_ids[: admission.prompt_len])
            line = [*prompt, *self._script(prompt, admission.sample_index)][: self._lines.shape[1]]
            self._lines[admission.row, : len(line)] = torch.tensor(line, device=self._lines.device)
            self._ends[admission.row] = len(line)

    def propose(self, step: Step) -> Drafts:
        rows = step.batch.padded.rows
        known = step.known[rows]
        columns = known[:, None] + torch.arange(step.num_wanted, device=rows.device)
        tokens = self._lines[rows[:, None], columns.clamp_max(self._lines.shape[1] - 1)]
        wanted = self._counts[known.clamp_max(self._counts.shape[0] - 1)]
        return Drafts(tokens, torch.minimum(wanted, self._ends[rows] - known).clamp(0, step.num_wanted))
