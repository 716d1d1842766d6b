"""Error messages of requests, as types that say whose fault the failure is. No torch."""

from __future__ import annotations


class ExplainedFailure(str):
    """An error message that says why the request failed."""


class OwnFailure(ExplainedFailure):
    """The error message of a request that failed because of its own parameters."""
