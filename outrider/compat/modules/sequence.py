"""Stands for `vllm.sequence`: parts of outputs, which earlier versions of vLLM have there."""

from outrider.core.outputs import Logprob, RequestMetrics

__all__ = ["Logprob", "RequestMetrics"]


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)
    raise ImportError(f"{__name__}.{name} is not supported: outputs and their parts are in outrider.outputs, and "
                      "layers are the engine's own")
