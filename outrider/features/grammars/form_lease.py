"""FormLease: the part of a request with structured outputs that keeps its grammar compiled, and the errors with which
such a request fails. It is pickled to workers. No torch."""

from __future__ import annotations

from outrider.core.failures import Busy, OwnFailure
from outrider.core.feature_parts import RequestPart

MAX_REASON = 300  # characters of what a grammar library says


class FormLease(RequestPart):
    """Keeps a compiled grammar for one request, from the request's check until the request ends or is dropped.
    `leases.py` counts the leases, and drops grammars without any."""

    __slots__ = ("__weakref__", "client", "digest", "number")
    masks_tokens = decides_end = True

    def __init__(self, number: int, digest: bytes, client: str | None) -> None:
        """number: the number of the compiled grammar in the worker. client: who sent the request. None is the program
        itself, which may lease any number of grammars."""
        self.number, self.digest, self.client = number, digest, client


class FormsBusy(Busy):
    """Raised if too many grammars of one client are compiled or wait to be compiled. The client may try again later."""


class FormFailure(OwnFailure):
    """The failure of a request whose grammar allows no further token. It ends only this request. Either the grammar
    exceeded the grammar library's limits during generation, or a token did not follow the grammar."""

    @classmethod
    def from_matcher(cls, error: str) -> FormFailure:
        reason = " ".join(error.split())[:MAX_REASON]
        return cls(f"structured_outputs: the grammar allows no further token ({reason}); make it simpler")
