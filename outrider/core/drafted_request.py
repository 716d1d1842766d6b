"""DraftedRequest: the attributes of the scheduler's requests that speculation reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from outrider.core import Bound, Finish, Settled
from outrider.core.checked_request import CheckedRequest
from outrider.core.costs import SamplerLoad


class DraftedRequest(Protocol):
    """The interface of the scheduler's `Request` that speculation uses."""

    @property
    def id(self) -> int: ...

    @property
    def input(self) -> CheckedRequest: ...

    @property
    def row(self) -> int: ...

    @property
    def token_ids(self) -> Sequence[int]:
        """The prompt, and the output tokens that results have confirmed (settled outputs)."""

    @property
    def end_len(self) -> int:
        """Number of known tokens at which the request ends."""

    @property
    def settled(self) -> Settled: ...

    @property
    def bound(self) -> Bound: ...

    @property
    def finish(self) -> Finish: ...

    @property
    def in_flight_samples(self) -> int:
        """Number of steps in flight that each yield at least one token of the request."""

    @property
    def yields_tokens(self) -> bool:
        """Whether the request decodes: all tokens known at its admission are computed, or will be by the steps in
        flight."""

    @property
    def sampler_load(self) -> SamplerLoad: ...

    @property
    def max_drafts(self) -> int | None:
        """Most drafts in a step that the caller allows; None leaves the number to the engine."""

    @property
    def num_proposed(self) -> int:
        """Number of drafts that wait on the device to be checked, according to the last result."""

    @property
    def levels(self) -> int:
        """The drafter's confidence in the drafts that wait on the device, packed as described in
        `core/draft_confidence.py`."""

    # The same, of the drafts that the last settled step checked. Speculation sets it to 0 for drafts of the host.
    checked_levels: int
