"""The load of a simulation: requests with their times of arrival, read from a file or drawn at random.

A `Load` gives the requests that arrive at fixed times (an open loop). In a closed loop a client waits for each answer
before it sends its next request, so a `Load` also gives the request that follows when one has ended.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Annotated, Any, Protocol

from outrider.core.fields import INT64, Count, NotEmpty, Range, TokenId, check_value
from outrider.simulation.device import prefix_tokens, tokens_of


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request: its time of arrival, its lengths, and the prefix that it shares with other requests."""

    arrival: float
    prompt_len: int
    output_len: int
    prefix: int = 0  # number of the shared beginning
    prefix_len: int = 0  # tokens of it; 0: the prompt is the request's own
    given_ids: tuple[int, ...] | None = None  # the prompt's tokens, where a file names them

    def token_ids(self, number: int) -> tuple[int, ...]:
        """Make the prompt of this request. `number`: the request's number, which makes its tokens differ from other
        requests'."""
        if self.given_ids is not None:
            return self.given_ids
        own = tokens_of(number, self.prefix_len, self.prompt_len)
        return (*prefix_tokens(self.prefix, self.prefix_len), *own) if self.prefix_len else tuple(own)

    @property
    def beginning(self) -> object:
        """Return a key for the shared prefix of the prompt, which routers compare; None if no other request shares
        it."""
        if self.given_ids is not None:
            return self.given_ids[:BEGINNING]
        return self.prefix if self.prefix_len else None


MAX_ARRIVAL = 1e9  # seconds: beyond, the times of steps are lost in a float's rounding
BEGINNING = 256  # tokens of a named prompt that count as its beginning


FIELDS: dict[str, Any] = {
    "arrival": Annotated[float, Range(0, MAX_ARRIVAL)], "prompt_tokens": Count, "output_tokens": Count,
    "prompt_token_ids": Annotated[list[TokenId], NotEmpty], "prefix": str | int,
    "prefix_tokens": Annotated[int, Range(0, INT64)],
}
NEEDED = ("It needs prompt_tokens or prompt_token_ids, and output_tokens; arrival, prefix, prefix_tokens are optional")


class Load(Protocol):
    def arrivals(self) -> Iterator[TracedRequest]:
        """The requests that arrive at fixed times, in order."""

    def after(self, now: float) -> TracedRequest | None:
        """Return the request that a client sends next, after a request of its own has ended at time `now`."""


class Lengths(Protocol):
    def draw(self, source: Random) -> int: ...


@dataclass(frozen=True)
class FixedLength:
    length: int

    def draw(self, source: Random) -> int:
        return self.length


@dataclass(frozen=True)
class LognormalLength:
    median: int
    sigma: float  # of the logarithm
    most: int

    def draw(self, source: Random) -> int:
        return max(1, min(self.most, round(self.median * source.lognormvariate(0.0, self.sigma))))


MAX_SIGMA = 10  # lengths of a larger one are too large for a float


def parse_lengths(text: str, most: int) -> Lengths:
    """Parse a distribution of lengths: `512`, or `lognormal:512:0.8` for a median of 512 and a sigma of 0.8. most: the
    longest length that can be served."""
    kind, *numbers = text.split(":")
    try:
        if kind == "lognormal" and len(numbers) == 2 and int(numbers[0]) > 0 and 0 <= float(numbers[1]) <= MAX_SIGMA:
            return LognormalLength(int(numbers[0]), float(numbers[1]), most)
        if not numbers and 0 < int(kind) <= most:
            return FixedLength(int(kind))
    except ValueError:
        pass
    raise ValueError(f"{text!r} is not a length: give a number of tokens from 1 to {most}, or lognormal:MEDIAN:SIGMA "
                     f"with a sigma of at most {MAX_SIGMA}")


@dataclass(frozen=True)
class SharedPrefixes:
    """Prefixes that requests share, chosen at random by Zipf's law: prefix i has a weight of (i + 1) to the power of
    -zipf."""

    count: int
    length: int
    zipf: float = 1.0

    def draw(self, source: Random) -> int:
        return source.choices(range(self.count), cum_weights=self._weights(), k=1)[0]

    def _weights(self) -> list[float]:
        if (self.count, self.zipf) not in _WEIGHTS:
            _WEIGHTS[self.count, self.zipf] = list(accumulate((i + 1) ** -self.zipf for i in range(self.count)))
        return _WEIGHTS[self.count, self.zipf]


_WEIGHTS: dict[tuple[int, float], list[float]] = {}


class Shapes:
    """Draws the lengths and prefixes of requests, one after another."""

    def __init__(self, prompts: Lengths, outputs: Lengths, prefixes: SharedPrefixes | None, seed: int,
                 most: int) -> None:
        """prompts: the distribution of prompt lengths without prefixes. most: the most tokens of a prompt and its
        answer together; a longer answer is cut."""
        self._prompts, self._outputs, self._prefixes, self._most = prompts, outputs, prefixes, most
        self._source = Random(f"shapes {seed}")

    def draw(self, arrival: float) -> TracedRequest:
        prompt_len = min(self._prompts.draw(self._source), self._most - 1)
        output_len = min(self._outputs.draw(self._source), self._most - prompt_len)
        if self._prefixes is None:
            return TracedRequest(arrival, prompt_len, output_len)
        length = self._prefixes.length
        return TracedRequest(arrival, length + prompt_len, output_len, self._prefixes.draw(self._source), length)


class OpenLoad:
    """Requests that arrive at a rate, one by one or in bursts of a fixed size. They do not wait for earlier requests to
    end."""

    def __init__(self, shapes: Shapes, num_requests: int, rate: float, *, burst: int = 1, seed: int = 0) -> None:
        self._shapes, self._num, self._rate, self._burst = shapes, num_requests, rate, burst
        self._source = Random(f"arrivals {seed}")

    def arrivals(self) -> Iterator[TracedRequest]:
        now = 0.0
        for number in range(self._num):
            if number % self._burst == 0:
                now += self._source.expovariate(self._rate / self._burst)
            yield self._shapes.draw(now)

    def after(self, now: float) -> TracedRequest | None:
        return None


class ClosedLoad:
    """A fixed number of clients. Each sends a request, reads the whole answer, and sends the next."""

    def __init__(self, shapes: Shapes, num_requests: int, num_clients: int) -> None:
        self._shapes, self._num_clients = shapes, min(num_clients, num_requests)
        self._num_left = num_requests - self._num_clients

    def arrivals(self) -> Iterator[TracedRequest]:
        for _ in range(self._num_clients):
            yield self._shapes.draw(0.0)

    def after(self, now: float) -> TracedRequest | None:
        if not self._num_left:
            return None
        self._num_left -= 1
        return self._shapes.draw(now)


class RecordedLoad:
    """The requests of a file, one JSON object a line: `arrival` in seconds, `output_tokens`, and `prompt_token_ids` or
    `prompt_tokens`. `prefix` names a shared beginning, and `prefix_tokens` is its length."""

    def __init__(self, path: Path) -> None:
        self._names: dict[str, int] = {}
        try:
            lines = path.read_text(encoding="utf-8-sig").split("\n")  # a text in JSON may hold other ends of lines
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from None
        asks = [self._ask(f"{path}, line {number}", line) for number, line in enumerate(lines, 1) if line.strip()]
        self._asks = sorted(asks, key=lambda ask: ask.arrival)
        if not asks:
            raise ValueError(f"{path} holds no requests: give one JSON object a line")

    @property
    def longest(self) -> int:
        return max(ask.prompt_len + ask.output_len for ask in self._asks)

    def arrivals(self) -> Iterator[TracedRequest]:
        return iter(self._asks)

    def after(self, now: float) -> TracedRequest | None:
        return None

    def _ask(self, place: str, line: str) -> TracedRequest:
        try:
            given: Any = json.loads(line)
            if not isinstance(given, dict):
                raise ValueError("it is not a JSON object")
            for name, declared in FIELDS.items():
                if given.get(name) is not None:
                    check_value(name, declared, given[name])
            ids, prefix = given.get("prompt_token_ids"), given.get("prefix")
            length = given["prompt_tokens"] if ids is None else len(ids)
            shared = (given.get("prefix_tokens") or 0) if ids is None else 0
            if shared > length or (shared and prefix is None):
                raise ValueError("prefix_tokens must be at most prompt_tokens, and need prefix, a name")
            number = self._names.setdefault(str(prefix), len(self._names))
            return TracedRequest(float(given.get("arrival") or 0.0), length, given["output_tokens"], number, shared,
                                 None if ids is None else tuple(ids))
        except KeyError as error:
            raise ValueError(f"{place} is not a valid request: {error.args[0]} is missing. {NEEDED}") from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{place} is not a valid request: {error}. {NEEDED}") from None
