"""SyntheticStep: a step for benchmarks that accepts drafts at chosen rates. Otherwise it is an ordinary step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from outrider.drafters.synthetic import SyntheticAcceptance
from outrider.kernels.step import CommittedStep
from outrider.runner.batch import Inputs
from outrider.runner.step import DeviceStep


class SyntheticStep(DeviceStep):
    def __init__(self, rates: Sequence[Sequence[float]], *parts: Any, **settings: Any) -> None:
        super().__init__(*parts, **settings)
        self._acceptance = SyntheticAcceptance(rates, self.state.drafts.shape[1], self.state.device)

    @property
    def fills_drafts(self) -> bool:
        """Whether missing drafts are filled up with token 0. They are, because the chosen rates alone decide how many
        drafts are accepted. A drafter with layers always proposes enough."""
        return not self.drafting.has_layers

    def commit(self, inputs: Inputs, tokens: torch.Tensor, bad: torch.Tensor) -> CommittedStep:
        tokens = self._acceptance.apply(tokens, inputs.logit_rows, inputs.drafts, self.state.sampling.seed,
                                        self.model.vocab_size)
        return super().commit(inputs, tokens, bad)
