"""BatchPart: what one feature tells its other half on the device in one step. No torch."""

from __future__ import annotations


class BatchPart:
    """Base of what one feature sends with a batch. A subclass is plain data and lies in the feature's folder. A batch
    has the part only if there is something to send."""

    __slots__ = ()
