"""Failures of requests, as types that say whether the client, the parameters or the server caused them. No torch."""

from __future__ import annotations


class Busy(ValueError):
    """Raised if a client asks for too much at once: the request may be sent again later."""


class ExplainedFailure(str):
    """An error message that says why the request failed."""


class OwnFailure(ExplainedFailure):
    """The error message of a request that failed because of its own parameters."""
