"""LogitsProcessor: an operator's own code that changes logits before a token is chosen. Names follow vLLM.

The operator names classes when an engine starts (`logits_processors`); requests pass values to them in `extra_args`.
An engine makes one instance of each class, which sees the requests of a step as a batch with indices. No torch.
"""

from __future__ import annotations

import enum
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from importlib import import_module
from typing import Any, TypeAlias, TypeVar

from outrider.core.drafter_faults import words_of
from outrider.core.failures import ExplainedFailure
from outrider.core.fields import shown
from outrider.core.params import SamplingParams

State = TypeVar("State")
Tensor: TypeAlias = Any  # a torch.Tensor
Device: TypeAlias = Any  # a torch.device
# Called with the output ids and the logits [V] of one request, or with its prompt ids before these two.
RequestLogitsProcessor: TypeAlias = Callable[..., Tensor]


class ProcessorFailure(ExplainedFailure):
    """Error message of a request for which a logits processor raised an exception."""


class MoveDirectionality(enum.Enum):
    UNIDIRECTIONAL = enum.auto()
    SWAP = enum.auto()


AddedRequest: TypeAlias = tuple[int, SamplingParams, list[int] | None, list[int]]
MovedRequest: TypeAlias = tuple[int, int, MoveDirectionality]


@dataclass(frozen=True)
class BatchUpdate:
    """The changes of the batch since the previous call: first removals, then additions, then moves.

    An addition has the index, parameters, prompt ids (None: the prompt only has embeddings) and output ids of a
    request. A processor may keep the list of output ids: the engine appends every new token to the list.
    """

    batch_size: int
    removed: Sequence[int]  # indices that no added request takes
    added: Sequence[AddedRequest]  # an index that is in use is taken from its request
    moved: Sequence[MovedRequest]


class LogitsProcessor(ABC):
    """Base class of an operator's processors. With drafts, each position of a request is processed separately. Its
    output ids are all tokens before it, drafts included. When a draft is rejected, its request is added to the batch
    again."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ValueError for parameters that the processor cannot serve. Called before a request is accepted."""

    @abstractmethod
    def __init__(self, vllm_config: Any, device: Device, is_pin_memory: bool) -> None: ...

    @abstractmethod
    def apply(self, logits: Tensor) -> Tensor:
        """Return the processed logits [batch size, V]; the given ones may be changed in place."""

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Whether the processor never changes which token is likeliest. If so, it is called after the temperature and
        min-p and before top-k and top-p, with logits whose maximum is 0. Otherwise it is called after logit_bias and
        before penalties."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Called before every `apply`. None: the batch has the same requests as before."""


class AdapterLogitsProcessor(LogitsProcessor):
    """A processor that makes a separate function for each request that asks for it. A subclass implements
    `new_req_logits_processor`."""

    def __init__(self, vllm_config: Any, device: Device, is_pin_memory: bool) -> None:
        self.req_info: dict[int, Callable[[Tensor], Tensor]] = {}  # by index in the batch

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """Return the function that processes the logits of a request with these parameters. None: its logits stay
        unchanged."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.req_info, batch_update, self._bind)

    def apply(self, logits: Tensor) -> Tensor:
        for index, process in self.req_info.items():
            logits[index] = process(logits[index])
        return logits

    def _bind(self, params: SamplingParams, prompt_ids: list[int] | None,
              output_ids: list[int]) -> Callable[[Tensor], Tensor] | None:
        process = self.new_req_logits_processor(params)
        if process is None:
            return None
        if len(inspect.signature(process).parameters) < 3:
            return partial(process, output_ids)
        if prompt_ids is None:
            raise ValueError("a logits processor of this engine reads the prompt's token ids, and this prompt has only "
                             "embeddings: give prompt_token_ids too")
        return partial(process, prompt_ids, output_ids)


def process_dict_updates(entries: dict[int, State], batch_update: BatchUpdate | None,
                         new_state: Callable[[SamplingParams, list[int] | None, list[int]], State | None]) -> bool:
    """Update the states that a processor keeps by batch index. `new_state` makes the state of an added request, or
    returns None if it needs none. Returns whether a state was added, removed or moved."""
    if batch_update is None:
        return False
    before = dict(entries)
    for index in batch_update.removed:
        entries.pop(index, None)
    for index, params, prompt_ids, output_ids in batch_update.added:
        entries.pop(index, None)
        state = new_state(params, prompt_ids, output_ids)
        if state is not None:
            entries[index] = state
    for source, target, direction in batch_update.moved:
        moved, displaced = entries.pop(source, None), entries.pop(target, None)
        if moved is not None:
            entries[target] = moved
        if displaced is not None and direction is MoveDirectionality.SWAP:
            entries[source] = displaced
    return before.keys() != entries.keys() or any(before[index] is not entries[index] for index in entries)


def load_processors(given: Sequence[Any]) -> list[type[LogitsProcessor]]:
    """Import the classes of the setting `logits_processors`. Each is given as a class or as "package.module:Class"."""
    return [_load(own) for own in given]


def _load(given: Any) -> type[LogitsProcessor]:
    kind, reason = given, ""
    if isinstance(given, str) and given.count(":") == 1:
        module, name = given.split(":")
        try:
            kind = reduce(getattr, name.split("."), import_module(module))
        except Exception as error:  # the operator's module may raise anything
            reason = f", which cannot be imported: {words_of(error)}"
    if not (isinstance(kind, type) and issubclass(kind, LogitsProcessor)):
        raise ValueError("logits_processors must be a list of subclasses of "
                         "outrider.v1.sample.logits_processor.LogitsProcessor, or of their names as "
                         f"'package.module:Class', got {shown(given)}{reason}")
    return kind
