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


async def load(registry: AdapterRegistry | None, call: Callable[[Callable[[], Any]], Future[Any]],
               asked: LoRARequest) -> int:
    """The number of an adapter's load, once it is there. It is kept until `release` of the registry."""
    own = need_registry(registry)
    number: int = await asyncio.wrap_future(call(lambda: own.begin(asked)))
    try:
        while not await asyncio.wrap_future(call(lambda: own.is_ready(number))):
            await asyncio.sleep(POLL_SECONDS)
    except BaseException:
        call(lambda: own.release(number))
        raise
    return number
