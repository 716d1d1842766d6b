"""Every rank adds the bias of a layer whose products are summed later, and not one rank alone."""

from __future__ import annotations

from typing import Any

import torch

from outrider.formats.summed import SummedLinear

NAME = "rank: the bias of an unsummed product on every rank"
TESTS = ["tests/ranks/test_families.py", "-k", "nemotron_h_latent-4"]


def apply() -> None:
    def with_bias(self: Any, total: torch.Tensor) -> torch.Tensor:
        return total if self._bias is None else total + self._bias

    SummedLinear._with_bias = with_bias  # type: ignore[method-assign]
