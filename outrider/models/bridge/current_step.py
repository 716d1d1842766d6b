"""CurrentStep: the step that a bridged model computes. Its modules share one object of this class.

transformers' code passes no context from module to module, so the modules that replace its own read this object. The
model sets it for the duration of a forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F

from outrider.layers import StepContext
from outrider.layers.rotary import Angles, Rotary
from outrider.mixers import PagedLayer

ROWS_AT_ONCE = 16  # tables have a multiple of these rows: Triton compiles a kernel anew for sizes of another kind


class CurrentStep:
    def __init__(self) -> None:
        self._context: StepContext | None = None
        self._angles: dict[int, tuple[torch.Tensor, Angles]] = {}  # by the identity of the step's cosines

    @contextmanager
    def of(self, context: StepContext) -> Iterator[None]:
        """Context manager: inside it the modules compute the token rows of `context`."""
        before, self._context = self._context, context
        try:
            yield
        finally:
            self._context = before
            self._angles.clear()

    @property
    def context(self) -> StepContext:
        assert self._context is not None, "a bridged module was called outside of a forward"
        return self._context

    def mixer(self, layer: int) -> PagedLayer:
        paged: PagedLayer = self.context.attend.mixer(layer)
        return paged

    def angles_of(self, cos: torch.Tensor, sin: torch.Tensor) -> Angles:
        """Return the token rows' rotation in the form of the engine's layers. cos, sin: [1, tokens, rotary dim], from
        transformers. Made once per step and shared by the layers."""
        if id(cos) not in self._angles:
            self._angles[id(cos)] = cos, _StepRotary(cos, sin).angles()
        return self._angles[id(cos)][1]


class _StepRotary(Rotary):
    """A rope table with one row for each token row of a step. Other tables have one row for each position."""

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor) -> None:
        self._num_tokens, half = cos.shape[1], cos.shape[-1] // 2
        wide = torch.float64 if cos.dtype == torch.float64 else torch.float32
        table = torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1).to(wide)
        self.table = F.pad(table, (0, 0, 0, -self._num_tokens % ROWS_AT_ONCE))

    def angles(self) -> Angles:
        return self.at(torch.arange(self._num_tokens, device=self.table.device))
