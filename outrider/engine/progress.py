"""Progress bars, which are shown only on a terminal. No torch."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from outrider.core.any_output import Output
from outrider.core.fields import shown
from outrider.core.status_line import is_terminal


def bar(items: Any = None, **options: Any) -> Any:
    """Make a tqdm bar that is shown only on a terminal."""
    return tqdm(items, disable=not is_terminal(sys.stderr), leave=False, dynamic_ncols=True, file=sys.stderr, **options)


def loading_bar(model: str) -> Callable[[Any, int], Any]:
    """Return a function that shows a progress bar while the loader reads tensors (a `Watch` of the loader)."""
    return lambda tensors, count: bar(tensors, total=count, desc=f"loading {model}", unit="tensors")


class RequestBar:
    """A bar of finished requests that shows tokens per second. `wanted`: whether to show it, or a function that makes
    the bar."""

    def __init__(self, wanted: bool | Callable[..., Any], num_requests: int) -> None:
        if wanted and not isinstance(wanted, bool) and not callable(wanted):
            raise ValueError(f"use_tqdm must be True, False or a function that makes a bar, got {shown(wanted)}")
        make = bar if isinstance(wanted, bool) else wanted
        self._bar = make(total=num_requests, desc="requests", unit="req") if wanted else None
        self._start, self._num_tokens = time.perf_counter(), 0

    def finish(self, output: Output) -> None:
        if self._bar is None:
            return
        self._num_tokens += output.num_output_tokens
        self._bar.set_postfix_str(f"{self._num_tokens / (time.perf_counter() - self._start):.1f} tokens/s", False)
        self._bar.update(1)

    def __enter__(self) -> RequestBar:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.close()
