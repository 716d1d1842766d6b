"""Sizes of decode steps, in token rows. The worker captures a graph for each size, and the scheduler pads batches to
these sizes.

A graph has a fixed number of requests and of token rows. How many rows each request has is an input of the graph.
"""

from __future__ import annotations

ROW_STEP = 32  # token rows between neighbouring sizes, at most
FEW = 8  # requests up to which token rows cost nothing: all requests have equally many there


def unequal_sizes(requests: int, max_drafts: int) -> range:
    """Return the sizes, ascending, of steps whose requests have different numbers of drafts, up to `max_drafts` each.
    All are smaller than the step in which every request has the most drafts. They are multiples of `requests`, or of
    ROW_STEP if there are more requests than that."""
    step = requests if requests <= ROW_STEP else ROW_STEP
    return range(0) if requests <= FEW else range((requests // step + 1) * step, requests * (1 + max_drafts), step)


def size_for(requests: int, num_tokens: int, max_drafts: int) -> int:
    """Return the number of token rows of the smallest step that holds `num_tokens` tokens. The step has `requests`
    requests, padding included, each with at most `max_drafts` drafts."""
    most = requests * (1 + max_drafts)
    step = requests if requests <= ROW_STEP else ROW_STEP
    return most if requests <= FEW else min(most, max(requests, -(-num_tokens // step) * step))
