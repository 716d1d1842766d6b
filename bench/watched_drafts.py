"""The drafts that a head makes behind every token of a text, and how many of each chain are right.

For benchmarks that ask what some way to check drafts would have accepted: requests run with `speculative=False`, so
that no draft is checked, and from the chains follow the runs of any way to choose among them.
"""

from __future__ import annotations

from typing import NamedTuple

from outrider.drafters.autoregressive import AutoregressiveDrafter
from outrider.drafters.base import Drafts, Step

DEPTH = 4  # drafts of a chain
FIRST_SEED = 1000  # request i has the seed FIRST_SEED + i, by which its chains are found


class WatchedChain(NamedTuple):
    """The drafts behind a token: how many are right, and their levels (`core/draft_confidence.py`)."""

    num_right: int
    levels: int
    num_steps: int  # since the drafter last rested


class WatchedDrafts:
    """Keeps the drafts of every request, by its seed and the position of the first draft."""

    def __init__(self) -> None:
        self._propose = AutoregressiveDrafter.propose
        self.num_steps = 0  # since the drafter last rested; set by what lets it rest
        self._found: dict[int, dict[int, tuple[list[int], int, int]]] = {}  # drafts, their levels, steps since a rest

    @classmethod
    def install(cls) -> WatchedDrafts:
        """Watch every head of this process from now on."""
        watched = cls()

        def propose(self: AutoregressiveDrafter, step: Step) -> Drafts:
            return watched.propose(self, step)

        AutoregressiveDrafter.propose = propose  # type: ignore[method-assign]
        return watched

    def propose(self, drafter: AutoregressiveDrafter, step: Step) -> Drafts:
        """In place of the drafter's own method."""
        drafts, rows = self._propose(drafter, step), step.batch.padded.rows
        assert drafts.levels is not None
        columns = zip(step.sampling.seed[rows].tolist(), step.known[rows].tolist(), drafts.tokens.tolist(),
                      drafts.levels.tolist(), strict=True)
        for seed, position, tokens, levels in columns:
            self._found.setdefault(seed, {})[position] = tokens, levels, self.num_steps
        return drafts

    def chains(self, seed: int, text: list[int], prompt_len: int) -> dict[int, WatchedChain]:
        """The chains of a request that has run, by position. text: its prompt and its output."""
        chains = {}
        for position, (tokens, levels, num_steps) in sorted(self._found.get(seed, {}).items()):
            if len(tokens) == DEPTH and prompt_len < position <= len(text) - DEPTH:
                pairs = zip(tokens, text[position:], strict=False)
                num_right = next((place for place, (own, true) in enumerate(pairs) if own != true), DEPTH)
                chains[position] = WatchedChain(num_right, levels, num_steps)
        return chains
