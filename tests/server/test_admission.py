"""The bound of the queue: a tenant that fills it keeps no other tenant out."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from outrider.server.admission import QueueBound
from outrider.server.errors import ApiError


def test_a_full_queue_refuses_only_tenants_that_have_their_part() -> None:
    bound = QueueBound(6)  # and two run
    with ExitStack() as held:
        for _ in range(8):
            held.enter_context(bound.admit(1, 2, "one"))
        for tenant in ("one", None):  # None: nobody knows who asks
            with pytest.raises(ApiError) as refused, bound.admit(1, 2, tenant):
                pass
            assert refused.value.status == 429
        for _ in range(4):
            held.enter_context(bound.admit(1, 2, "two"))
        with pytest.raises(ApiError), bound.admit(1, 2, "two"):
            pass
        held.enter_context(bound.admit(1, 2, "three"))
        assert bound.num_live == 13
    assert bound.num_live == 0
    with bound.admit(100, 2, "one"):  # an empty server takes any number
        pass


def test_a_server_is_ready_while_any_key_would_be_served() -> None:
    bound = QueueBound(6)
    bound.check_room(2, 2)
    with ExitStack() as held:
        for _ in range(8):
            held.enter_context(bound.admit(1, 2, "one"))
        bound.check_room(2, 2)  # one key fills the queue, and the other is served
        with pytest.raises(ApiError):
            bound.check_room(2, 1)
        for _ in range(4):
            held.enter_context(bound.admit(1, 2, "two"))
        with pytest.raises(ApiError):
            bound.check_room(2, 2)
    with bound.admit(8, 2, None), pytest.raises(ApiError):  # a server without keys
        bound.check_room(2, 0)
    bound.check_room(2, 0)
