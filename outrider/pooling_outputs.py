"""Outputs of requests that ask for hidden states instead of text. Names follow vLLM's. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from outrider.core.outputs import OutputIncrement, RequestMetrics
from outrider.feature_list import request_half

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vectors: TypeAlias = NDArray[np.float32]


@dataclass
class PoolingOutput:
    """The hidden states of one request. `data`: a vector, or with pooling="all" one row for each token of the prompt.
    `LLM.encode` and `AsyncLLM.encode` give torch tensors; within the engine it is a numpy array."""

    data: Any = None
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
        """Return the tokens from which the request can be resumed, by sample index: none, because a request for hidden
        states starts again from the beginning. See `RequestOutput.cut_back` for other requests."""
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
class ClassificationOutput:
    probs: list[float]  # one for each class

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass
class ClassificationRequestOutput:
    request_id: str
    outputs: ClassificationOutput
    prompt_token_ids: list[int]
    finished: bool = True

    @classmethod
    def from_pooled(cls, output: PoolingRequestOutput) -> ClassificationRequestOutput:
        assert output.outputs.data is not None
        return cls(output.request_id, ClassificationOutput(output.outputs.data.tolist()), output.prompt_token_ids)


@dataclass
class ScoringOutput:
    score: float


@dataclass
class ScoringRequestOutput:
    """The score of two texts: the cosine similarity of their embeddings, or the probability that a head for pairs of
    texts gives them."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]  # tokens of both texts, one after the other
    finished: bool = True


def cosine(one: PoolingRequestOutput, other: PoolingRequestOutput) -> float:
    """Return the cosine similarity of two embeddings of length 1."""
    assert one.outputs.data is not None and other.outputs.data is not None
    return float(one.outputs.data @ other.outputs.data)


def as_tensors(outputs: Sequence[PoolingRequestOutput]) -> None:
    """Replace the data of outputs by torch tensors, in place."""
    request_half("pooling").as_tensors(outputs)


def raise_failed(outputs: Sequence[PoolingRequestOutput]) -> None:
    """Raise the error of the first failed request: a list of embeddings has no place for errors."""
    for output in outputs:
        if output.error is not None:
            raise RuntimeError(f"request {output.request_id}: {output.error}")
