"""Outputs of requests, importable from the path that vLLM uses."""

from outrider.core.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput

__all__ = ["CompletionOutput", "Logprob", "RequestMetrics", "RequestOutput"]
