"""Keepers of features follow requests from arrival to end, all together or not at all."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from outrider.core.checked_request import CheckedRequest
from outrider.core.request_keeper import RequestKeeper, RequestKeepers
from tests.unit.made_requests import made_request


class Counting(RequestKeeper):
    def __init__(self) -> None:
        self.num_requests = 0

    def enter(self, requests: Sequence[CheckedRequest]) -> None:
        self.num_requests += len(requests)

    def leave(self, asked: CheckedRequest) -> None:
        self.num_requests -= 1


class Refusing(RequestKeeper):
    def enter(self, requests: Sequence[CheckedRequest]) -> None:
        raise ValueError("not these")


def test_requests_that_one_keeper_refuses_are_kept_by_none() -> None:
    before, after = Counting(), Counting()
    keepers = RequestKeepers([before, Refusing(), after])
    with pytest.raises(ValueError, match="not these"):
        keepers.enter([made_request([1]), made_request([2])])
    assert (before.num_requests, after.num_requests) == (0, 0)
