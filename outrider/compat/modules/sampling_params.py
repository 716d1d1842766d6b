"""Parameters of requests, at the place where vLLM has them."""

from outrider.beam_search import BeamSearchParams
from outrider.core.params import SamplingParams
from outrider.core.structured import StructuredOutputsParams

__all__ = ["BeamSearchParams", "SamplingParams", "StructuredOutputsParams"]

# Names of vLLM's module that are not here, with what to use instead.
NOT_HERE = {
    "GuidedDecodingParams": "use StructuredOutputsParams, as SamplingParams(structured_outputs=...)",
    "RequestOutputKind": "use LLM.stream for partial outputs",
}


def __getattr__(name: str) -> object:
    if name in NOT_HERE:
        raise ImportError(f"{__name__}.{name} is not supported: {NOT_HERE[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
