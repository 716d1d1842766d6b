"""BatchPart: what one feature tells its other half on the device in one step. No torch."""

from __future__ import annotations


class BatchPart:
    """A subclass is plain data, and lies with its feature. A batch has the part only if there is something to tell."""

    __slots__ = ()
