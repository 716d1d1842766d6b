"""Stands for `vllm.logprobs`: types of the log-probabilities in outputs."""

from outrider.core.outputs import Logprob

__all__ = ["Logprob", "LogprobsOnePosition", "PromptLogprobs", "SampleLogprobs"]

LogprobsOnePosition = dict[int, Logprob]
PromptLogprobs = list[LogprobsOnePosition | None]  # None for the first token
SampleLogprobs = list[LogprobsOnePosition]


def __getattr__(name: str) -> object:
    if name == "FlatLogprobs":
        raise ImportError(f"{__name__}.{name} is not supported: log-probabilities are lists of dicts")
    raise AttributeError(f"{__name__} has no {name!r}; it has {', '.join(__all__)}")
