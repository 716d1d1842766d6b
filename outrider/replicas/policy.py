"""PrefixRouter: chooses the replica that gets a prompt. It prefers the replica that has already received the longest
prefix of the prompt, because that replica's prefix cache holds it. If that replica has too much load, the least loaded
one is chosen.

Pure Python, without I/O: the HTTP front and the router of Ray Serve both use it. It records only the prompts that it
has routed itself. If a replica has evicted a prompt's pages, it computes the prompt again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

MAX_BLOCKS = 1 << 17  # beginnings of prompts that are remembered, over all replicas
MOST_BEHIND = 4  # requests that a preferred replica may have more than the least loaded one ...
BEHIND_SHARE = 0.5  # ... or this share of the least load, if that is more


class PrefixRouter:
    """Chooses the replica for a prompt. Replicas are given by name. A prompt is a list of block hashes, each of which
    covers all blocks before it (`prompt_blocks`); the list is empty if the prompt could not be read."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        # The replicas that were given a block, by the block's hash; the block that was used last is the last one.
        self._holders: OrderedDict[int, tuple[str, ...]] = OrderedDict()
        self._turns: dict[str, int] = {}  # number of the last prompt that a replica was given
        self._num_given = 0

    def choose(self, blocks: Sequence[int], loads: Mapping[str, int]) -> str:
        """Choose the replica for a prompt. `loads`: the number of running requests of each replica that may be chosen;
        not empty."""
        least = min(loads.values())
        chosen = self._preferred(blocks, loads)
        if chosen is None or loads[chosen] > least + max(MOST_BEHIND, BEHIND_SHARE * least):
            chosen = self._least_loaded(loads, loads)
        return chosen

    def remember(self, blocks: Sequence[int], replica: str) -> None:
        """Record that a replica has received a prompt."""
        self._num_given += 1
        self._turns[replica] = self._num_given
        for block in reversed(blocks):  # the end of a prompt is forgotten before its beginning
            holders = self._holders.get(block, ())
            self._holders[block] = holders if replica in holders else (*holders, replica)
            self._holders.move_to_end(block)
        while len(self._holders) > self._max_blocks:
            self._holders.popitem(last=False)

    def forget(self, replica: str) -> None:
        """Forget the prompts of a replica, because it has ended or restarts with an empty cache."""
        self._turns.pop(replica, None)
        for block, holders in list(self._holders.items()):
            if replica not in holders:
                continue
            left = tuple(name for name in holders if name != replica)
            if left:
                self._holders[block] = left
            else:
                del self._holders[block]

    def num_matched(self, blocks: Sequence[int], replica: str) -> int:
        """Count the prompt's first blocks that a replica has received before."""
        return next((i for i in range(len(blocks), 0, -1) if replica in self._holders.get(blocks[i - 1], ())), 0)

    def __len__(self) -> int:
        return len(self._holders)

    def _preferred(self, blocks: Sequence[int], loads: Mapping[str, int]) -> str | None:
        """The replica that has received the longest prefix of the prompt; the least loaded one if several have. None if
        none has."""
        for block in reversed(blocks):
            holders = [name for name in self._holders.get(block, ()) if name in loads]
            if holders:
                return self._least_loaded(holders, loads)
        return None

    def _least_loaded(self, names: Iterable[str], loads: Mapping[str, int]) -> str:
        """The replica with the least load. If several have it, the one that has received no prompt for the longest
        time: otherwise, with a client that sends one request at a time, all prompts would go to the same replica's
        cache."""
        return min(names, key=lambda name: (loads[name], self._turns.get(name, 0), name))
