"""PoolingParams: how the hidden states of a prompt are combined to its embedding. Names follow vLLM's. No torch."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, replace
from typing import Annotated, Any

from outrider.core.class_head import ClassHead
from outrider.core.fields import Count, OneOf, check_fields, check_names
from outrider.core.hidden_params import HiddenReport
from outrider.core.hidden_request import HiddenGatherer, HiddenTask
from outrider.core.outputs import SampleKey
from outrider.feature_list import request_half
from outrider.pooling_outputs import PoolingRequestOutput

REPORTS = {"last": HiddenReport.LAST, "mean": HiddenReport.SUM, "all": HiddenReport.ALL}
TASKS = ("embed", "classify", "token_embed", "token_classify")
# Fields of vLLM's PoolingParams that Outrider does not have, with what to do instead.
REFUSED_FIELDS = {
    "truncate_prompt_tokens": "truncate the prompt yourself",
    "returned_token_ids": "use pooling='all' and choose",
    "step_tag_id": "use pooling='all' and choose",
}


@dataclass
class PoolingParams(HiddenTask):
    """Parameters of a request for an embedding: how the hidden states of its prompt are combined."""

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
            raise ValueError("PoolingParams: for classes, pooling must be 'last' or 'all', and dimensions must be left "
                             "out")

    @property
    def classifies(self) -> bool:
        return self.task == "classify"

    @property
    def report(self) -> HiddenReport:
        if self.classifies:
            return HiddenReport.ALL_CLASSES if self.pooling == "all" else HiddenReport.CLASSES
        return REPORTS[self.pooling]

    def checked(self, hidden_size: int, classes: ClassHead | None) -> PoolingParams:
        """Return a checked copy, because a caller may have changed fields, and may change them later."""
        if self.classifies and classes is None:
            raise ValueError("this model has no head that classifies: use LLM.embed, LLM.score or LLM.encode")
        if self.dimensions is not None and self.dimensions > hidden_size:
            raise ValueError(f"dimensions={self.dimensions} exceeds the {hidden_size} dimensions of this model: ask "
                             "for at most that, or leave dimensions out")
        request_half("pooling")  # this installation has it
        return replace(self)

    def make_gatherer(self, key: SampleKey, prompt_len: int, classes: ClassHead | None) -> HiddenGatherer:
        gatherer: HiddenGatherer = request_half("pooling")(key, self, prompt_len, classes)
        return gatherer

    def make_output(self, request_id: str, prompt: str | None, token_ids: list[int]) -> PoolingRequestOutput:
        return PoolingRequestOutput(request_id, prompt, token_ids)
