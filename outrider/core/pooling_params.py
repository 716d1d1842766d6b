"""PoolingParams: how the hidden states of a prompt become its embedding. Names follow vLLM's. No torch."""

from __future__ import annotations

import enum
from dataclasses import InitVar, dataclass, replace
from typing import Annotated, Any, TypeAlias

from outrider.core.class_head import ClassHead
from outrider.core.fields import Count, OneOf, check_fields, check_names
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
        """Whether the states of all tokens are needed, so that none may come from the prefix cache."""
        return self in (HiddenReport.SUM, HiddenReport.ALL, HiddenReport.ALL_CLASSES)


REPORTS = {"last": HiddenReport.LAST, "mean": HiddenReport.SUM, "all": HiddenReport.ALL}
TASKS = ("embed", "classify", "token_embed", "token_classify")
# Fields of vLLM's PoolingParams that Outrider does not have, with what to do instead.
REFUSED_FIELDS = {
    "truncate_prompt_tokens": "truncate the prompt yourself",
    "returned_token_ids": "use pooling='all' and choose",
    "step_tag_id": "use pooling='all' and choose",
}


@dataclass
class PoolingParams:
    """How the hidden states of a prompt become its embedding."""

    pooling: Annotated[str, OneOf(tuple(REPORTS))] = "last"  # all: one vector for each token
    normalize: bool = True  # vectors of length 1; of classes: probabilities instead of the head's scores
    dimensions: Count | None = None  # the first so many of each vector; None: all
    task: Annotated[str, OneOf(TASKS)] = "embed"  # classify: scores of a head; token_...: with pooling="all"
    use_activation: InitVar[bool | None] = None  # vLLM's name of normalize

    def __new__(cls, *args: Any, **fields: Any) -> PoolingParams:
        check_names("PoolingParams", cls, fields, REFUSED_FIELDS)
        return super().__new__(cls)

    def __post_init__(self, use_activation: bool | None) -> None:
        if use_activation is not None:
            self.normalize = use_activation
        check_fields("PoolingParams: ", self)
        if self.task.startswith("token_"):
            self.task, self.pooling = self.task.removeprefix("token_"), "all"
        if self.task == "classify" and (self.pooling == "mean" or self.dimensions is not None):
            raise ValueError("PoolingParams: classes are scored by the last token, or with pooling='all' by every one, "
                             "and have no dimensions to cut")

    @property
    def classifies(self) -> bool:
        return self.task == "classify"

    @property
    def report(self) -> HiddenReport:
        if self.classifies:
            return HiddenReport.ALL_CLASSES if self.pooling == "all" else HiddenReport.CLASSES
        return REPORTS[self.pooling]

    def checked(self, hidden_size: int, classes: ClassHead | None) -> PoolingParams:
        """A copy, checked again: a caller may have changed fields, and may change them later."""
        if self.classifies and classes is None:
            raise ValueError("this model has no head that classifies: use LLM.embed, LLM.score or LLM.encode")
        if self.dimensions is not None and self.dimensions > hidden_size:
            raise ValueError(f"dimensions={self.dimensions} exceeds the {hidden_size} dimensions of this model")
        return replace(self)


RequestParams: TypeAlias = SamplingParams | PoolingParams
