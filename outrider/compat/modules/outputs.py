"""Stands for `vllm.outputs`: classes of requests' outputs."""

from outrider.core.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from outrider.pooling_outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)

__all__ = ["ClassificationOutput", "ClassificationRequestOutput", "CompletionOutput", "EmbeddingOutput",
           "EmbeddingRequestOutput", "Logprob", "PoolingOutput", "PoolingRequestOutput",
           "RequestMetrics", "RequestOutput", "ScoringOutput", "ScoringRequestOutput"]
