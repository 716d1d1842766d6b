"""ClassHead: describes a model's head that scores classes instead of tokens. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from outrider.core.fields import OneOf

ACTIVATIONS = ("softmax", "sigmoid", "identity")


@dataclass(frozen=True)
class ClassHead:
    labels: tuple[str, ...]  # names of the classes, in the order of their scores
    activation: Annotated[str, OneOf(ACTIVATIONS)]  # makes probabilities of the scores
    separates_pairs: bool  # the tokenizer joins two texts that are scored together; otherwise they are one text

    @property
    def num_labels(self) -> int:
        return len(self.labels)
