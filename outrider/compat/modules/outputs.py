"""Outputs of requests, importable from the path that vLLM uses."""

from outrider.core.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from outrider.core.pooling import (
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
