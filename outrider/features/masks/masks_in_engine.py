"""MasksInEngine: the engine's part of sampling masks. KeptIds: the mask of one sample."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from outrider.config import EngineConfig
from outrider.core.checked_request import CheckedRequest
from outrider.core.feature_parts import RequestPart
from outrider.core.outputs import OutputIncrement, SampleEnd, SampleKey
from outrider.core.params import MAX_KEPT_IDS, SamplingParams
from outrider.core.request_keeper import RequestKeepers
from outrider.core.sample_addition import AddingPart, SampleAddition
from outrider.core.step_messages import TokenLogprobs
from outrider.engine.engine_feature import Caller, EngineFeature, EngineTools


class MasksInEngine(EngineFeature):
    def __init__(self, config: EngineConfig) -> None:
        self._is_processed = config.logprobs_mode == "processed"
        self._vocab_size = 0

    def make_keeper(self, tools: EngineTools) -> None:
        self._vocab_size = tools.model.limits.vocab_size

    def check_params(self, params: SamplingParams) -> None:
        if not self._is_processed:
            raise ValueError("return_sampling_mask: the mask belongs to log-probabilities after the filters: start the "
                             "engine with logprobs_mode='processed_logprobs', or leave return_sampling_mask out")
        if not params.filters:
            raise ValueError("return_sampling_mask: no filter drops a token: set a temperature above 0 and top_k, "
                             "top_p or min_p, or leave return_sampling_mask out")
        if params.top_k > MAX_KEPT_IDS:
            raise ValueError(f"return_sampling_mask: top_k={params.top_k} keeps more than the {MAX_KEPT_IDS} ids that "
                             "a place of a mask may have: lower top_k, or leave return_sampling_mask out")

    def part_maker(self, params: SamplingParams, caller: Caller | None) -> Callable[[], RequestPart] | None:
        return (lambda: MaskPart(self._vocab_size)) if params.return_sampling_mask else None


class MaskPart(AddingPart):
    """Part of a request that asks for sampling masks. A worker, which makes no outputs, gets an empty part instead."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return RequestPart, ()

    def make_additions(self, key: SampleKey, asked: CheckedRequest, keepers: RequestKeepers) -> list[SampleAddition]:
        num = asked.sampling.num_reported
        assert num is not None, "a mask is read from log-probabilities"
        return [KeptIds(self._vocab_size if num < 0 else min(num, self._vocab_size), self._vocab_size)]


class KeptIds(SampleAddition):
    """Notes the processed log-probabilities of a sample's places, and reads the kept ids from them when it ends."""

    name = "sampling_mask"
    serves_aborted = True

    def __init__(self, num_reported: int, vocab_size: int) -> None:
        self._num_reported, self._vocab_size = num_reported, vocab_size
        self._places: list[list[int] | None] = []

    def resume(self, token_ids: list[int]) -> None:
        """Begin again with the tokens that an interrupted sample has sent, whose masks are no longer known."""
        self._places = [None] * len(token_ids)

    def take(self, increment: OutputIncrement) -> None:
        self._places += map(self._kept, increment.logprobs or ())

    def finish(self, end: SampleEnd) -> Callable[[], list[list[int] | None]]:
        return lambda: self._places

    def _kept(self, entry: TokenLogprobs) -> list[int] | None:
        """Return the kept ids of a place, the likeliest first. None: the filters kept more than were reported."""
        likeliest = list(zip(entry.token_ids[1:], entry.logprobs[1:], strict=True))
        kept = [token for token, logprob in likeliest if logprob > -inf]
        return None if len(kept) == len(likeliest) < self._vocab_size else kept
