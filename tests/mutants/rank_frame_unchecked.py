"""A node takes every peer and every frame, whatever their proofs and HMACs are."""

from __future__ import annotations

import hmac

NAME = "rank: frames between nodes taken unchecked"
TESTS = ["tests/ranks/test_node_channel.py", "-k", "given_to_nobody or another_secret"]


def apply() -> None:
    hmac.compare_digest = lambda one, other: True  # type: ignore[assignment]
