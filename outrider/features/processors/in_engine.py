"""ProcessorsInEngine: the engine's part of logits processors. It lets processors refuse the parameters of requests. No
torch."""

from __future__ import annotations

from outrider.config import EngineConfig
from outrider.core.drafter_faults import words_of
from outrider.core.params import SamplingParams
from outrider.engine.engine_feature import EngineFeature
from outrider.logits_processors import load_processors


class ProcessorsInEngine(EngineFeature):
    reads_extra_args = True

    def __init__(self, config: EngineConfig) -> None:
        self._kinds = load_processors(config.logits_processors)

    def check_params(self, params: SamplingParams) -> None:
        if params.prompt_logprobs_mode == "processed":
            raise ValueError("prompt_logprobs_mode='processed' is not served beside logits processors, which see the "
                             "logits of sampled tokens only: use prompt_logprobs_mode='raw', or an engine without "
                             "logits_processors")
        for kind in self._kinds:
            try:
                kind.validate_params(params)
            except Exception as error:  # the operator's code may raise anything
                raise ValueError(f"extra_args: {kind.__name__} refuses them: {words_of(error)}") from error
