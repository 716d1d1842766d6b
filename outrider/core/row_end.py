"""RowEnd: the message that a request has left its batch row. No torch."""

from __future__ import annotations

from typing import NamedTuple


class RowEnd(NamedTuple):
    """The message that a request has left its row, because it ended or was preempted."""

    row: int
    # Tokens of its text, the prompt's included, that count. 0 for a request that was preempted, aborted or failed.
    num_served: int
