"""HiddenParams: the parameters of a request for hidden states of its prompt. No torch."""

from __future__ import annotations

import enum
from typing import Self, TypeAlias

from outrider.core.class_head import ClassHead
from outrider.core.params import SamplingParams


class HiddenReport(enum.Enum):
    """The choice of hidden states of a prompt that are returned with the results of its steps. A request that asks for
    any ends when its prompt is computed."""

    NONE = "none: the request generates tokens"
    LAST = "the last token's"
    SUM = "the sum over the tokens of each step"
    ALL = "every token's"
    CLASSES = "the scores of the classes by the last token's"
    ALL_CLASSES = "the scores of the classes by every token's"

    @property
    def covers_prompt(self) -> bool:
        """Whether the hidden states of all tokens are needed, so that the request may take no prefix hit."""
        return self in (HiddenReport.SUM, HiddenReport.ALL, HiddenReport.ALL_CLASSES)


class HiddenParams:
    """Parameters of a request for hidden states of its prompt instead of text. The subclass HiddenTask also makes the
    request's output."""

    @property
    def report(self) -> HiddenReport:
        """Return which hidden states the request needs."""
        raise NotImplementedError

    def checked(self, hidden_size: int, classes: ClassHead | None) -> Self:
        """Return a copy, checked against the model. Raises ValueError if the model cannot serve it."""
        raise NotImplementedError


RequestParams: TypeAlias = SamplingParams | HiddenParams
