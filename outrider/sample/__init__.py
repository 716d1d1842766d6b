"""The sampler, which chooses tokens in every step. It reads sampling parameters kept per row, and the stages and lists
that a batch needs (`StepNeeds`, `StepExtras`). It offers the functions `sample` and `accept`."""

from typing import TYPE_CHECKING

from outrider.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from outrider.kernels.accept import Accepted, accept
    from outrider.sample.extras import StepExtras, StepNeeds
    from outrider.sample.logprobs import LogprobRows, logprob_rows, to_host
    from outrider.sample.philox import gumbel
    from outrider.sample.sampler import Sampled, sample
    from outrider.sample.sampling_batch import History, LogitRows
    from outrider.sample.sampling_rows import SamplingRows
else:
    __getattr__ = lazy_exports(__name__)

__all__ = [
    "Accepted", "History", "LogitRows", "LogprobRows", "Sampled", "SamplingRows", "StepExtras", "StepNeeds",
    "accept", "gumbel", "logprob_rows", "sample", "to_host",
]
