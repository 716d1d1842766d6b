"""The output of a pooling request: gathers the hidden states of its steps, and makes an embedding, scores or classes of
them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from outrider.core import Finish, RequestResult
from outrider.core.class_head import ClassHead
from outrider.core.lazy_exports import LateModule
from outrider.core.outputs import OutputIncrement, SampleEnd, SampleKey

if TYPE_CHECKING:
    from outrider.features.pooling import tensors
    from outrider.pooling_outputs import PoolingRequestOutput, Vectors
    from outrider.pooling_params import PoolingParams
else:
    tensors = LateModule("outrider.features.pooling.tensors")  # with torch


class PooledVectors:
    """The HiddenGatherer of the engine: gathers the hidden states of one request over its steps, and pools them at the
    end."""

    def __init__(self, key: SampleKey, params: PoolingParams, prompt_len: int, classes: ClassHead | None) -> None:
        self.is_finished = False
        self._activation = "identity" if classes is None else classes.activation
        self._key, self._params, self._prompt_len = key, params, prompt_len
        self._epoch = 0
        self._parts: list[Vectors] = []

    def take(self, result: RequestResult) -> OutputIncrement:
        """Gather hidden states. After a preemption the prompt is computed again, so the states gathered before are
        dropped."""
        if result.epoch != self._epoch:
            self._epoch, self._parts = result.epoch, []
        if result.hidden is not None:
            self._parts.append(result.hidden)
        if not result.finish:
            return OutputIncrement(self._key, [])
        self.is_finished = True
        end = SampleEnd(result.finish.reason, error=result.error)
        return OutputIncrement(self._key, [], end=end, hidden=None if result.error else self._pooled())

    def replay(self, token_ids: list[int]) -> str:
        assert not token_ids, "a request for hidden states has no output tokens"
        return ""

    def end(self, finish: Finish, error: str | None = None) -> OutputIncrement:
        self.is_finished = True
        return OutputIncrement(self._key, [], end=SampleEnd(finish.reason, error=error))

    @staticmethod
    def as_tensors(outputs: Sequence[PoolingRequestOutput]) -> None:
        """Replace the data of outputs by torch tensors, in place."""
        tensors.as_tensors(outputs)

    def _pooled(self) -> Vectors:
        vectors = np.concatenate(self._parts)
        if self._params.pooling == "mean":
            vectors = vectors.sum(axis=0, keepdims=True, dtype=np.float32) / np.float32(self._prompt_len)
        vectors = vectors[:, : self._params.dimensions]
        if self._params.classifies:
            vectors = probabilities(vectors, self._activation if self._params.normalize else "identity")
        elif self._params.normalize:
            lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
            vectors = vectors / np.maximum(lengths, np.float32(1e-12))
        return vectors if self._params.pooling == "all" else vectors[0]


def probabilities(scores: Vectors, activation: str) -> Vectors:
    """Turn the classifier's scores [n, classes] into the numbers to report for each class: probabilities, or the scores
    themselves."""
    match activation:
        case "softmax":
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            return weights / weights.sum(axis=1, keepdims=True)
        case "sigmoid":
            return np.float32(0.5) * (1 + np.tanh(np.float32(0.5) * scores))
    return scores

