"""HiddenParams: which hidden states of its prompt a request reads. No torch."""

from __future__ import annotations

import enum
from typing import Self, TypeAlias

from outrider.core.class_head import ClassHead
from outrider.core.params import SamplingParams


class HiddenReport(enum.Enum):
    """Hidden states of a prompt that the results of its steps carry. A request with any ends with its prompt."""

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
    """Parameters of a request that reads the hidden states of its prompt. See HiddenTask."""

    @property
    def report(self) -> HiddenReport:
        """The hidden states that it needs."""
        raise NotImplementedError

    def checked(self, hidden_size: int, classes: ClassHead | None) -> Self:
        """A copy that the model can serve. Raises ValueError if there is none."""
        raise NotImplementedError


RequestParams: TypeAlias = SamplingParams | HiddenParams
