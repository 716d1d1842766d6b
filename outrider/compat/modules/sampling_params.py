"""Stands for `vllm.sampling_params`: parameters of requests."""

from outrider.beam_search import BeamSearchParams
from outrider.compat.guided_decoding import GuidedDecodingParams
from outrider.core.params import RequestOutputKind, SamplingParams
from outrider.core.structured import StructuredOutputsParams

__all__ = ["BeamSearchParams", "GuidedDecodingParams", "RequestOutputKind", "SamplingParams",
           "StructuredOutputsParams"]
