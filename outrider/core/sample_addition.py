"""SampleAddition: a value that a feature adds to the output of a sample when the sample ends. No torch.

The feature's part of a request, an AddingPart, makes one SampleAddition for each of the request's samples. The engine's
thread calls the addition after each step, and the addition only stores the data that it needs. The value is computed
when it is first read, in the reader's thread, so that no step waits for it. This module is imported only for requests
that have additions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

from outrider.core.checked_request import CheckedRequest
from outrider.core.feature_parts import RequestPart
from outrider.core.outputs import OutputIncrement, SampleEnd, SampleKey
from outrider.core.request_keeper import RequestKeepers


class SampleAddition:
    """Follows one sample and makes the value that is added to it. A subclass overrides what it needs; by default a
    method does nothing."""

    name: ClassVar[str]  # of its value in `CompletionOutput.extras`, and of the field of a server's answers

    def use_weights(self, version: int, *, in_place: bool) -> None:
        """Called when the weights have changed. in_place: the request goes on with the keys, values and states that
        earlier weights have computed."""

    def resume(self, token_ids: list[int]) -> None:
        """Called before the first increment if the sample continues after an interrupt. token_ids: the tokens that its
        reader has already received."""

    def take(self, increment: OutputIncrement) -> None:
        """Called with the increment that each step adds to the sample."""

    def finish(self, end: SampleEnd) -> Callable[[], Any]:
        """Return a function that computes the value, which must be valid in JSON. Called after the last increment of a
        sample that a step has ended without an error."""
        raise NotImplementedError


class AddingPart(RequestPart):
    """A request part whose feature adds a value to each of the request's samples. A subclass overrides
    `make_additions`."""

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
