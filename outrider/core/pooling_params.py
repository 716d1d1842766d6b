"""PoolingParams: how the hidden states of a prompt become its embedding. Names follow vLLM's. No torch."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeAlias

from outrider.core.fields import Count, OneOf, check_fields, check_names
from outrider.core.params import SamplingParams


class HiddenReport(enum.Enum):
    """Hidden states of a prompt that the results of its steps carry. A request with any ends with its prompt."""

    NONE = "none: the request generates tokens"
    LAST = "the last token's"
    SUM = "the sum over the tokens of each step"
    ALL = "every token's"


REPORTS = {"last": HiddenReport.LAST, "mean": HiddenReport.SUM, "all": HiddenReport.ALL}
# Fields of vLLM's PoolingParams that Outrider does not have, with what to do instead.
REFUSED_FIELDS = {
    "truncate_prompt_tokens": "truncate the prompt yourself",
    "use_activation": "use normalize",
    "task": "use LLM.embed, LLM.score or LLM.encode",
    "returned_token_ids": "use pooling='all' and choose",
    "step_tag_id": "use pooling='all' and choose",
}


@dataclass
class PoolingParams:
    """How the hidden states of a prompt become its embedding."""

    pooling: Annotated[str, OneOf(tuple(REPORTS))] = "last"  # all: one vector for each token
    normalize: bool = True  # vectors of length 1
    dimensions: Count | None = None  # the first so many of each vector; None: all

    def __new__(cls, *args: Any, **fields: Any) -> PoolingParams:
        check_names("PoolingParams", cls, fields, REFUSED_FIELDS)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_fields("PoolingParams: ", self)

    @property
    def report(self) -> HiddenReport:
        return REPORTS[self.pooling]

    def checked(self, hidden_size: int) -> PoolingParams:
        """A copy, checked again: a caller may have changed fields, and may change them later."""
        if self.dimensions is not None and self.dimensions > hidden_size:
            raise ValueError(f"dimensions={self.dimensions} exceeds the {hidden_size} dimensions of this model")
        return replace(self)


RequestParams: TypeAlias = SamplingParams | PoolingParams
