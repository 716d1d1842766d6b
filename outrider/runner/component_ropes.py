"""ComponentRopes: the positions by which ropes of several components rotate a step's tokens. Imported for models with
such ropes.

In a text the components are equal. An image may take up fewer positions than it has tokens. The prompt then gives
explicit positions for all tokens up to its last image. The positions of later tokens are their index in the request
plus an offset that the row keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from outrider.core import Admission, Axis, Limits, StepPart
from outrider.kernels.buffers import buffer, to_device
from outrider.mixers import BatchView
from outrider.runner.step_inputs import ComponentRows


class RopePositions(NamedTuple):
    positions: torch.Tensor  # [tokens] of tokens whose components are equal
    components: torch.Tensor | None  # [3, tokens] if some token's are not


class ComponentRopes(StepPart):
    def __init__(self, limits: Limits, device: torch.device) -> None:
        self._shifts = buffer(limits, Axis.ROWS, dtype=torch.int64, device=device)
        self._shifted: dict[int, int] = {}  # rows whose number is not 0

    def admit(self, admissions: Sequence[Admission]) -> None:
        own = {each.row: sum(part.rope_shift for part in each.request.input_parts) for each in admissions}
        changed = {row: shift for row, shift in own.items() if shift != self._shifted.get(row, 0)}
        self._shifted = {row: shift for row, shift in (self._shifted | own).items() if shift}
        if changed:
            rows, shifts = to_device([*changed, *changed.values()], torch.int64, self._shifts.device).view(2, -1)
            self._shifts.index_copy_(0, rows, shifts)

    def reset(self) -> None:
        self._shifts.zero_()
        self._shifted = {}

    def of_step(self, view: BatchView, rows: ComponentRows | None, behind: int = 0) -> RopePositions:
        """Return the positions of a step's token rows. rows: positions given by the prompts' inputs. behind: the number
        by which a token's position is smaller than its index."""
        positions = (view.positions - behind + self._shifts[view.rows][view.request_of]).clamp_min_(0)
        if rows is None:
            return RopePositions(positions, None)
        return RopePositions(positions, positions.repeat(3, 1).index_copy_(1, rows.token_rows, rows.positions))
