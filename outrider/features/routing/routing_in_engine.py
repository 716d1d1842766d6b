"""RoutingInEngine: the engine's part of routed experts. RoutedTokens: the experts of one sample's tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.config import EngineConfig
from outrider.core.checked_request import CheckedRequest
from outrider.core.coded_arrays import encode_array
from outrider.core.feature_parts import RequestPart, ResultPart, find_part
from outrider.core.outputs import OutputIncrement, SampleEnd, SampleKey
from outrider.core.params import SamplingParams
from outrider.core.request_keeper import RequestKeepers
from outrider.core.sample_addition import AddingPart, SampleAddition
from outrider.core.step_messages import RequestResult
from outrider.engine.engine_feature import Caller, EngineFeature

if TYPE_CHECKING:
    from numpy.typing import NDArray


class RoutingInEngine(EngineFeature):
    def __init__(self, config: EngineConfig) -> None: ...

    def part_maker(self, params: SamplingParams, caller: Caller | None) -> Callable[[], RequestPart] | None:
        return RoutingPart


@dataclass(frozen=True, slots=True)
class RoutingPart(AddingPart):
    """Part of a request whose samples get the experts of their tokens."""

    needs_whole_prompt = True

    def make_additions(self, key: SampleKey, asked: CheckedRequest, keepers: RequestKeepers) -> list[SampleAddition]:
        return [RoutedTokens(len(asked.token_ids))]


@dataclass(frozen=True, slots=True)
class RoutedStep(ResultPart):
    """The experts of the tokens that a step has settled for one request."""

    experts: NDArray[Any]  # [tokens, layers, experts of a token]


class RoutedTokens(SampleAddition):
    """Joins what steps report of a sample's tokens. The last token of a sample was never computed and has no
    experts."""

    name = "routed_experts"
    serves_aborted = True

    def __init__(self, prompt_len: int) -> None:
        self._num_tokens = prompt_len
        self._epoch = -1
        self._steps: list[NDArray[Any]] = []  # [tokens, layers, experts of a token] each, one after the other

    def resume(self, token_ids: list[int]) -> None:
        self._num_tokens += len(token_ids)

    def note(self, result: RequestResult) -> None:
        """Add the tokens that a step has settled. A request that was preempted begins again with its first token."""
        if result.epoch != self._epoch:
            self._epoch, self._steps = result.epoch, []
        found = find_part(result.parts, RoutedStep)
        if found is not None:
            self._steps.append(found.experts)

    def take(self, increment: OutputIncrement) -> None:
        self._num_tokens += len(increment.token_ids)

    def finish(self, end: SampleEnd) -> Callable[[], str | None]:
        return lambda: _joined(self._steps, self._num_tokens - 1)


def _joined(steps: list[NDArray[Any]], num_tokens: int) -> str | None:
    import numpy as np

    return encode_array(np.concatenate(steps)[:num_tokens]) if steps else None
