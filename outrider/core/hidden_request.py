"""Requests for hidden states of their prompts, instead of text. No torch.

Hidden states here are those after the model's final norm, from which the head would compute logits. The core reports
them with the results of steps. A feature decides how they are used: a HiddenTask has the parameters of a request, a
HiddenGatherer collects its vectors over the steps, and a HiddenOutput is its output."""

from __future__ import annotations

from typing import Any, Protocol

from outrider.core.class_head import ClassHead
from outrider.core.hidden_params import HiddenParams
from outrider.core.outputs import OutputIncrement, RequestMetrics, SampleKey
from outrider.core.step_messages import Finish, RequestResult


class HiddenGatherer(Protocol):
    """Gathers the hidden states of one request over its steps. It has the methods of SampleOutput that the engine calls
    for the request."""

    is_finished: bool

    def take(self, result: RequestResult) -> OutputIncrement: ...

    def replay(self, token_ids: list[int]) -> str: ...

    def end(self, finish: Finish, error: str | None = None) -> OutputIncrement: ...


class HiddenOutput(Protocol):
    """The output of a request for hidden states. It has the methods of RequestOutput that grow and end it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    metrics: RequestMetrics
    finished: bool

    @property
    def num_cached_tokens(self) -> int: ...

    @property
    def error(self) -> str | None: ...

    @property
    def num_output_tokens(self) -> int: ...

    def grow(self, increment: OutputIncrement) -> None: ...

    def cut_back(self) -> dict[int, list[int]]: ...

    def fail(self, error: str) -> None: ...

    def copy(self) -> Any: ...


class HiddenTask(HiddenParams):
    """Base class of a feature's parameters for requests for hidden states. It also makes the objects that gather the
    hidden states and hold the output."""

    def make_gatherer(self, key: SampleKey, prompt_len: int, classes: ClassHead | None) -> HiddenGatherer:
        raise NotImplementedError

    def make_output(self, request_id: str, prompt: str | None, token_ids: list[int]) -> HiddenOutput:
        """Make the output of a request that has just been added."""
        raise NotImplementedError
