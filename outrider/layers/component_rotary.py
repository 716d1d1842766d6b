"""ComponentRotary: a rope whose frequencies rotate by different components of a position: time, row and column."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.layers.rotary import Angles, RopeParams, Rotary

COMPONENTS = 3


class GatheredRotary(Rotary):
    """A table with one row for each token row of a step, for kernels that take one position per token."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table


class ComponentRotary(Rotary):
    """A rope of several components. It is an ordinary rope if the components are equal, as in texts."""

    def __init__(self, params: RopeParams, sections: Sequence[int], *, max_len: int, dtype: torch.dtype,
                 device: torch.device) -> None:
        """sections: the number of frequencies that each component rotates. Rows and columns have every third one, from
        the second and from the third on; time has the others."""
        super().__init__(params, max_len=max_len, dtype=dtype, device=device)
        component = torch.zeros(params.rotary_dim // 2, dtype=torch.int64)
        for axis in range(1, COMPONENTS):
            component[axis : COMPONENTS * sections[axis] : COMPONENTS] = axis
        self._component = component.to(device)  # [frequencies]

    def of_step(self, positions: torch.Tensor, components: torch.Tensor | None) -> Angles:
        if components is None:
            return self.at(positions)
        halves = self.table[components].unflatten(-1, (2, -1))  # [3, tokens, cos | sin, frequencies]
        chosen = halves.gather(0, self._component.expand(1, *halves.shape[1:]))[0]
        return Angles(torch.arange(len(chosen), device=chosen.device), GatheredRotary(chosen.flatten(1).contiguous()))
