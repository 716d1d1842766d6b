"""HostDrafts: drafts that a drafter on the host makes for the batch which is being scheduled.

The host only knows settled tokens: those that results have confirmed. So its drafts continue these, and begin with a
guess of the tokens that steps in flight yield.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Container, Sequence
from operator import index
from typing import Protocol, TypeVar

from outrider.core import HostDraft, RequestResult
from outrider.core.drafted_request import DraftedRequest
from outrider.core.drafter_faults import FaultKind, FaultRecord, words_of
from outrider.speculation.draft_sources import DraftSources

Made = TypeVar("Made")


class HostDrafter(Protocol):
    """A drafter that runs on the host. `propose` guesses the tokens that follow a request's settled tokens, of which
    the first `prompt_len` are the prompt. `finish` gives the drafter the text of a request that has ended. tenant: the
    request's cache salt. Drafts for one tenant must not be made from texts of another."""

    def propose(self, request_id: int, token_ids: Sequence[int], prompt_len: int, num_wanted: int,
                tenant: str) -> list[int]: ...

    def finish(self, request_id: int, token_ids: Sequence[int], tenant: str) -> None: ...


class HostDrafts:
    """Calls a host drafter and checks its drafts; nothing else calls it. A faulty drafter only loses its drafts."""

    def __init__(self, drafter: HostDrafter, vocab_size: int, faults: FaultRecord | None = None,
                 max_drafts: int = 16) -> None:
        """faults: the drafter's faults under earlier schedulers of the same engine."""
        self._drafter, self._vocab_size = drafter, vocab_size
        self._faults = faults or FaultRecord.for_drafter(drafter)
        self._by_row: dict[int, HostDraft] = {}
        self._sources = DraftSources(max_drafts)

    def propose(self, requests: Sequence[DraftedRequest], counts: Sequence[int]) -> list[int]:
        """Make drafts for the next batch. counts: the most drafts of each request. Returns for each request how many
        drafts the batch is to check. Drafts of an earlier call that were not taken are dropped."""
        self._by_row = {}
        return [self._propose(request, most) if most and request.yields_tokens else most
                for request, most in zip(requests, counts, strict=True)]

    def take(self, rows: Container[int]) -> list[HostDraft]:
        """Take the drafts of the batch that is about to be queued. rows: the rows of its requests with drafts."""
        drafts, self._by_row = [draft for row, draft in self._by_row.items() if row in rows], {}
        return drafts

    def observe_device(self, request: DraftedRequest, result: RequestResult) -> None:
        """Note that a step of the request has ended. If the step had drafts, the device made them."""
        if result.num_drafted:
            self._sources.note_device(request.id, result.num_drafted, result.num_accepted)

    def finish(self, request: DraftedRequest) -> None:
        """Note that the request has ended, and give its text to the drafter for drafts of other requests."""
        self._sources.forget(request.id)
        self._call("finish()", lambda: self._drafter.finish(request.id, request.token_ids, _tenant(request)))

    def _propose(self, request: DraftedRequest, most: int) -> int:
        known = len(request.token_ids)
        most = min(most, request.end_len - known - request.in_flight_samples - 1)  # the step itself yields a token
        if most <= 0:
            return 0
        in_flight = request.bound.at_most + 1 - known
        guess = self._guess(request, most + in_flight)
        self._sources.note_guess(request.id, request.token_ids, guess, getattr(self._drafter, "last_match", 0))
        num_unknown = 0 if in_flight == 0 else request.in_flight_samples  # tokens of the guess that the device has
        if len(guess) <= num_unknown:
            return 0 if request.num_proposed == 0 else most  # a device drafter may have one
        if request.num_proposed and not self._sources.prefers_host(request.id, num_unknown, most):
            return most
        self._by_row[request.row] = HostDraft(request.row, known, guess)
        return min(most, len(guess))

    def _guess(self, request: DraftedRequest, num_wanted: int) -> list[int]:
        """Ask the drafter for at most num_wanted tokens and check them. Returns none if it is off or fails."""
        own, prompt_len = self._drafter, len(request.input.token_ids)

        def guess() -> list[int]:
            return _checked(own.propose(request.id, request.token_ids, prompt_len, num_wanted, _tenant(request)),
                            num_wanted, self._vocab_size)

        return self._call("propose()", guess) or []

    def _call(self, name: str, method: Callable[[], Made]) -> Made | None:
        """Call a method of the drafter, unless it is off. Returns None, with the fault noted, if that fails."""
        if self._faults.is_off:
            return None
        try:
            return method()
        except _WrongGuess as error:
            self._faults.add(error.kind, f"{name} returned {error}")
        except Exception as error:
            trace = "".join(traceback.format_exception(error))
            self._faults.add(FaultKind.RAISED, f"{name} raised {words_of(error)}", trace=trace)
        return None


def _tenant(request: DraftedRequest) -> str:
    return request.input.cache_salt or ""


class _WrongGuess(ValueError):
    def __init__(self, kind: FaultKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def _checked(guess: object, num_wanted: int, vocab_size: int) -> list[int]:
    if not isinstance(guess, (list, tuple)):
        raise _WrongGuess(FaultKind.FORM, f"{type(guess).__name__}, not a list of token ids")
    if len(guess) > num_wanted:
        raise _WrongGuess(FaultKind.COUNT, f"{len(guess)} tokens, where at most {num_wanted} are wanted")
    try:
        tokens = [index(token) for token in guess]
    except TypeError:
        raise _WrongGuess(FaultKind.FORM, f"tokens of types {sorted({type(t).__name__ for t in guess})}, not integers"
                          ) from None
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise _WrongGuess(FaultKind.TOKEN, f"the token id {token}")
    return tokens
