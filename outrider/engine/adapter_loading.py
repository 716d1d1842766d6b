"""How fronts get from the adapters that a caller names to the numbers of their loads. No torch.

An adapter is read beside the steps. A front asks now and then whether it is there, and meanwhile the engine goes on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from outrider.core.lora_request import LoRARequest
from outrider.engine.adapter_registry import AdapterHold, AdapterRegistry

POLL_SECONDS = 0.005
Made = TypeVar("Made")


class Run(Protocol):
    """A function that does something with the engine between two steps."""

    def __call__(self, action: Callable[[], Made], /) -> Made: ...


def need_registry(registry: AdapterRegistry | None) -> AdapterRegistry:
    if registry is None:
        raise ValueError("lora_request: this engine serves no adapters: start it with enable_lora=True")
    return registry


@contextmanager
def loaded(registry: AdapterRegistry | None, run: Run,
           asked: Sequence[LoRARequest | None]) -> Generator[list[int | None], None, None]:
    """The numbers of the loads of these adapters, which stay loaded while the block runs."""
    if not any(asked):
        yield [None] * len(asked)
        return
    own, holds = need_registry(registry), dict[LoRARequest, AdapterHold]()
    try:
        for each in dict.fromkeys(one for one in asked if one is not None):
            holds[each] = run(lambda each=each: own.begin(each))  # type: ignore[misc]
        for hold in holds.values():
            while not run(lambda hold=hold: own.is_ready(hold.number)):  # type: ignore[misc]
                time.sleep(POLL_SECONDS)
        yield [None if one is None else holds[one].number for one in asked]
    finally:
        for hold in holds.values():
            run(lambda hold=hold: own.release(hold))  # type: ignore[misc]


async def load(registry: AdapterRegistry, call: Callable[[Callable[[], Any]], Future[Any]],
               begin: Callable[[], AdapterHold]) -> AdapterHold:
    """Wait until an adapter is loaded, and return the hold that keeps it. `begin`: the registry's method `begin` or
    `hold`."""

    def begin_and_look() -> tuple[AdapterHold, bool]:
        hold = begin()
        return hold, hold.number in registry.sizes

    hold, is_there = await asyncio.wrap_future(call(begin_and_look))
    try:
        while not is_there:
            is_there = await asyncio.wrap_future(call(lambda: registry.is_ready(hold.number)))
            if not is_there:
                await asyncio.sleep(POLL_SECONDS)
    except BaseException:
        call(lambda: registry.release(hold))
        raise
    return hold
