"""Node 0 takes nodes of any version and with any settings."""

from __future__ import annotations

from outrider.engine.hosts import meeting
from outrider.engine.hosts.node_facts import NodeFacts

NAME = "rank: nodes that differ"
TESTS = ["tests/ranks/test_node_channel.py", "-k", "other_settings or another_version"]


def apply() -> None:
    def nothing(here: NodeFacts, there: NodeFacts) -> list[str]:
        return []

    meeting.differences = nothing
