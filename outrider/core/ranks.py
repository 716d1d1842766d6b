"""RankLost: the failure of what ranks do together."""

from __future__ import annotations


class RankLost(RuntimeError):
    """A rank could not reach the others, or waited for them too long. Ranks run the same sums in the same order, and
    after this failure their orders may differ: no further step may run, and all ranks start again."""
