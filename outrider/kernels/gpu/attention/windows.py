"""Windows of attention layers: the kinds for which kernels are compiled, and the first key that a query sees.

A window limits the keys that a query sees. It ends at the query's own position, and either slides with it or begins at
the edge of a chunk, which is a multiple of the window's size.
"""

from __future__ import annotations

import triton
import triton.language as tl

NO_WINDOW = tl.constexpr(0)
SLIDING = tl.constexpr(1)
CHUNKED = tl.constexpr(2)


def window_kind(window: int | None, is_chunked: bool) -> int:
    """Return the constant WINDOW_KIND of the kernels for a layer's window."""
    if window is None:
        return int(NO_WINDOW.value)
    return int((CHUNKED if is_chunked else SLIDING).value)


@triton.jit
def first_seen(position, window, WINDOW_KIND: tl.constexpr):
    """Return the first key that a query at `position` sees; negative if a sliding window begins before the text."""
    if WINDOW_KIND == CHUNKED:
        return position - position % window
    else:
        return position - window + 1
