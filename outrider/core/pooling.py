"""PoolingParams and the outputs of requests that ask for hidden states instead of text. Names follow vLLM's. No torch.

The hidden states are those after the model's final norm, which the head would make logits of.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from outrider.core.fields import Count, OneOf, check_fields, check_names
from outrider.core.outputs import OutputIncrement, RequestMetrics, RequestOutput
from outrider.core.params import SamplingParams
from outrider.core.step import HiddenReport

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vectors: TypeAlias = NDArray[np.float32]

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


@dataclass
class PoolingOutput:
    """`data`: a vector, or with pooling="all" one row for each token of the prompt."""

    data: Vectors | None = None
    error: str | None = None


@dataclass
class PoolingRequestOutput:
    """The output of a request for hidden states. It has its data when it is finished."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: PoolingOutput = field(default_factory=PoolingOutput)
    finished: bool = False
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    @property
    def num_cached_tokens(self) -> int:
        return self.metrics.num_cached_tokens

    @property
    def error(self) -> str | None:
        return self.outputs.error

    @property
    def num_output_tokens(self) -> int:
        return 0

    def grow(self, increment: OutputIncrement) -> None:
        self.metrics = increment.sample.metrics
        if increment.hidden is not None:
            self.outputs.data = increment.hidden
        if increment.end is not None:
            self.finished, self.outputs.error = True, increment.end.error
            if increment.end.finish_reason == "abort":
                self.outputs.error = "the request was aborted"

    def cut_back(self) -> dict[int, list[int]]:
        """A request that has not finished begins anew, without any known output."""
        return {} if self.finished else {0: []}

    def fail(self, error: str) -> None:
        if not self.finished:
            self.finished, self.outputs.error = True, error

    def copy(self) -> PoolingRequestOutput:
        return replace(self, outputs=replace(self.outputs), metrics=replace(self.metrics))


@dataclass
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass
class EmbeddingRequestOutput:
    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool = True

    @classmethod
    def from_pooled(cls, output: PoolingRequestOutput) -> EmbeddingRequestOutput:
        assert output.outputs.data is not None
        return cls(output.request_id, EmbeddingOutput(output.outputs.data.tolist()), output.prompt_token_ids)


@dataclass
class ScoringOutput:
    score: float


@dataclass
class ScoringRequestOutput:
    """The similarity of two texts: the cosine of the angle between their embeddings."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]  # tokens of both texts, one after the other
    finished: bool = True


Output: TypeAlias = RequestOutput | PoolingRequestOutput
RequestParams: TypeAlias = SamplingParams | PoolingParams


def empty_output(request_id: str, prompt: str | None, token_ids: list[int], params: RequestParams) -> Output:
    """The output of a request that has just been added."""
    if isinstance(params, PoolingParams):
        return PoolingRequestOutput(request_id, prompt, token_ids)
    return RequestOutput.empty(request_id, prompt, token_ids, params)
