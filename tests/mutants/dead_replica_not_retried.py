"""A request whose replica dies before its first byte is given up, though another replica could serve it."""

from __future__ import annotations

from outrider.replicas import front

NAME = "requests of a dead replica are given up"
TESTS = ["tests/server/test_replica_front.py", "-k", "goes_to_another"]


def apply() -> None:
    front.MOST_DEATHS = 0
