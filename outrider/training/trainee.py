"""Trainee: the interface of a drafter in training, which every method implements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from outrider.models.base import Model
from outrider.training.methods import METHODS
from outrider.training.settings import TrainingSettings
from outrider.training.teacher import TaughtTexts
from outrider.training.vocabulary import DraftVocabulary


@dataclass(frozen=True)
class DrafterCard:
    """The text of the README beside an exported drafter."""

    target_name: str
    lines: list[str]  # how the drafter was made and what it reached, as Markdown


class PassOutput(NamedTuple):
    """The input and the weight of a pass's output layer: logits are states @ weight'."""

    states: torch.Tensor  # [rows, n]
    weight: torch.Tensor  # [draft vocabulary, n]


class Trainee(ABC):
    """A drafter in training: its weights in float32, under their names in the exported file, and its outputs on texts.
    Made as Class(target, settings, vocabulary); `load` may replace the fresh weights afterwards."""

    weights: dict[str, torch.Tensor]  # trained ones
    num_passes: int

    @classmethod
    @abstractmethod
    def aux_layers_for(cls, target: Model, settings: TrainingSettings) -> tuple[int, ...]:
        """The layers of the target whose residual streams the method reads. Raises ValueError for a target that does
        not have them."""

    @abstractmethod
    def __init__(self, target: Model, settings: TrainingSettings, vocabulary: DraftVocabulary) -> None: ...

    @abstractmethod
    def outputs(self, taught: TaughtTexts, rows: list[torch.Tensor]) -> Iterator[PassOutput]:
        """Yield for each pass the states from which the logits of its draft are computed. rows: for each pass the
        indexes (text * length + position) of the last known tokens, on the target's device."""

    @torch.no_grad()
    def logits(self, taught: TaughtTexts, rows: list[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield for each pass the logits [rows, draft vocabulary], to measure acceptance. Products are in float32: in
        16 bits several tokens may have equal logits, which would count as wrong drafts."""
        for states, weight in self.outputs(taught, rows):
            with torch.autocast(states.device.type, enabled=False):
                yield F.linear(states.to(weight.dtype), weight)

    @abstractmethod
    def export(self, folder: Path, card: DrafterCard, file_form: str) -> None:
        """Write the drafter in the form that serving engines load."""

    def with_gradients(self) -> AbstractContextManager[object]:
        """The context in which the loss and its gradients are computed."""
        return nullcontext()

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        """Replace the weights with those of a checkpoint."""
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(weights[name])

    @property
    def num_parameters(self) -> int:
        return sum(weight.numel() for weight in self.weights.values())


def trainee_class(method: str) -> type[Trainee]:
    """The trainee class of a method. Imports the method's file."""
    module, _, name = METHODS[method].partition(":")
    found: type[Trainee] = getattr(import_module(module), name)
    return found
