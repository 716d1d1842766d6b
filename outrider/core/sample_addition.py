"""SampleAddition: a value that a feature adds to the output of a sample when the sample ends. No torch.

The feature's part of a request, an AddingPart, makes one SampleAddition for each of the request's samples. The engine's
thread calls the addition after each step, and the addition only stores the data that it needs. The value is computed
when it is first read, in the reader's thread, so that no step waits for it. This module is imported only for requests
that have additions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from outrider.core.checked_request import CheckedRequest
from outrider.core.feature_parts import RequestPart
from outrider.core.outputs import OutputIncrement, SampleEnd, SampleKey
from outrider.core.request_keeper import RequestKeepers
from outrider.core.step_messages import RequestResult, TokenLogprobs


class SampleAddition:
    """Follows one sample and makes the value that is added to it. A subclass overrides what it needs; by default a
    method does nothing."""

    name: ClassVar[str]  # of its value in `CompletionOutput.extras`, and of the field of a server's answers
    serves_aborted: ClassVar[bool] = False  # whether a sample that was aborted gets the value for the tokens it has

    def use_weights(self, version: int, *, in_place: bool) -> None:
        """Called when the weights have changed. in_place: the request goes on with the keys, values and states that
        earlier weights have computed."""

    def resume(self, token_ids: list[int]) -> None:
        """Called before the first increment if the sample continues after an interrupt. token_ids: the tokens that its
        reader has already received."""

    def note(self, result: RequestResult) -> None:
        """Called with the result of a step in which the feature's code in the worker has added to
        `RequestResult.parts`, also while the prompt is being computed."""

    def take(self, increment: OutputIncrement) -> None:
        """Called with the increment that each step adds to the sample."""

    def finish(self, end: SampleEnd) -> Callable[[], Any]:
        """Return a function that computes the value, which must be valid in JSON. Called after the last increment of a
        sample that a step has ended without an error, or that was aborted (`serves_aborted`)."""
        raise NotImplementedError


class AddingPart(RequestPart):
    """A request part whose feature attaches an extra value to the output of each of the request's samples. A subclass
    overrides `make_additions`."""

    __slots__ = ()
    adds_to_samples = True

    def make_additions(self, key: SampleKey, asked: CheckedRequest,
                       keepers: RequestKeepers) -> Iterable[SampleAddition]:
        """Make the additions for one sample of this request. Called when the request is added. Raises ValueError if an
        addition cannot be made."""
        raise NotImplementedError


class Extras(Mapping[str, Any]):
    """Values that features add to a sample, by name. Each value is computed when it is first read. A copy is a plain
    dict of all values."""

    def __init__(self, makers: Mapping[str, Callable[[], Any]] | None = None) -> None:
        self._makers, self._made = dict(makers or {}), dict[str, Any]()

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made.setdefault(name, self._makers[name]())  # two threads that read at once get one value
            self._makers[name] = lambda: self._made[name]  # the function may hold a prompt
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapping) and dict(self) == dict(other)

    def __reduce__(self) -> tuple[type, tuple[dict[str, Any]]]:
        return dict, (dict(self),)


def add_extras(end: SampleEnd, additions: Sequence[SampleAddition]) -> SampleEnd:
    """Let the additions of a sample that has ended make their values."""
    return end._replace(extras=Extras({addition.name: addition.finish(end) for addition in additions}))


def cut_logprobs(increment: OutputIncrement, num: int | None) -> OutputIncrement:
    """Keep the log-probabilities of the `num` likeliest tokens (None: none), where additions have read more."""
    entries = increment.logprobs
    if entries is None or num is None:
        return increment._replace(logprobs=None)
    return increment._replace(logprobs=[_cut(entry, 1 + num) for entry in entries])


def _cut(entry: TokenLogprobs, width: int) -> TokenLogprobs:
    texts = None if entry.texts is None else entry.texts[:width]
    return TokenLogprobs(entry.token_ids[:width], entry.logprobs[:width], entry.rank, texts)
