"""Parameters of requests, at the place where vLLM has them."""

from outrider.beam_search import BeamSearchParams
from outrider.core.params import SamplingParams
from outrider.core.structured import StructuredOutputsParams

__all__ = ["BeamSearchParams", "SamplingParams", "StructuredOutputsParams"]
