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
from outrider.engine.adapters import AdapterRegistry

POLL_SECONDS = 0.005
Made = TypeVar("Made")


class Run(Protocol):
    """Does something with the engine between two steps."""

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
    own, numbers = need_registry(registry), dict[LoRARequest, int]()
    try:
        for each in dict.fromkeys(one for one in asked if one is not None):
            numbers[each] = run(lambda each=each: own.begin(each))  # type: ignore[misc]
        for number in numbers.values():
            while not run(lambda number=number: own.is_ready(number)):  # type: ignore[misc]
                time.sleep(POLL_SECONDS)
        yield [None if one is None else numbers[one] for one in asked]
    finally:
        for number in numbers.values():
            run(lambda number=number: own.release(number))  # type: ignore[misc]


async def load(registry: AdapterRegistry, call: Callable[[Callable[[], Any]], Future[Any]],
               begin: Callable[[], int]) -> int:
    """The number of an adapter's load, once it is there. `begin` of the registry, or `hold`, keeps the load until
    `release`."""

    def begin_and_look() -> tuple[int, bool]:
        number = begin()
        return number, number in registry.sizes

    number, is_there = await asyncio.wrap_future(call(begin_and_look))
    try:
        while not is_there:
            is_there = await asyncio.wrap_future(call(lambda: registry.is_ready(number)))
            if not is_there:
                await asyncio.sleep(POLL_SECONDS)
    except BaseException:
        call(lambda: registry.release(number))
        raise
    return int(number)
