"""Loads the LoRA adapters that callers of LLM and AsyncLLM name. No torch.

The engine reads an adapter in the background and goes on making steps. The caller's side polls until the adapter has
been read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from outrider.core.checked_request import CheckedRequest
from outrider.engine.engine import Engine
from outrider.lora_request import AdapterChoice, AdapterHold, AdapterLoads, LoadedAdapter, LoRARequest, one_for_each

POLL_SECONDS = 0.005
Made = TypeVar("Made")


class Run(Protocol):
    """A function that calls an action between two steps of the engine, and returns the action's result."""

    def __call__(self, action: Callable[[], Made], /) -> Made: ...


def need_adapters(engine: Engine) -> AdapterLoads:
    found = engine.keepers.find(AdapterLoads)  # type: ignore[type-abstract]
    if found is None:
        raise ValueError("lora_request: this engine serves no adapters: start it with enable_lora=True")
    return found


def with_adapter(request: CheckedRequest, number: int | None) -> CheckedRequest:
    """Return a copy of the request that uses the adapter with this load number. With None, return the request
    unchanged."""
    return request if number is None else request.with_part(LoadedAdapter(number))


@contextmanager
def loaded(engine: Engine, run: Run, requests: Sequence[CheckedRequest],
           adapters: AdapterChoice) -> Generator[list[CheckedRequest], None, None]:
    """Load the adapters that the caller asks for, and yield the requests with the load numbers of their adapters. The
    adapters stay loaded while the block runs."""
    asked = one_for_each(adapters, len(requests))
    if not any(asked):
        yield list(requests)
        return
    own, holds = need_adapters(engine), dict[LoRARequest, AdapterHold]()
    try:
        for each in dict.fromkeys(one for one in asked if one is not None):
            holds[each] = run(lambda each=each: own.begin(each))  # type: ignore[misc]
        for hold in holds.values():
            while not run(lambda hold=hold: own.is_ready(hold.number)):  # type: ignore[misc]
                time.sleep(POLL_SECONDS)
        yield [with_adapter(request, None if one is None else holds[one].number)
               for request, one in zip(requests, asked, strict=True)]
    finally:
        for hold in holds.values():
            run(lambda hold=hold: own.release(hold))  # type: ignore[misc]


async def load(adapters: AdapterLoads, call: Callable[[Callable[[], Any]], Future[Any]],
               begin: Callable[[], AdapterHold]) -> AdapterHold:
    """Wait until an adapter is loaded, and return its hold, which keeps it loaded. `begin` starts the load: it calls
    `AdapterLoads.begin` or `AdapterLoads.hold`."""

    def begin_and_look() -> tuple[AdapterHold, bool]:
        hold = begin()
        return hold, adapters.is_loaded(hold.number)

    hold, is_there = await asyncio.wrap_future(call(begin_and_look))
    try:
        while not is_there:
            is_there = await asyncio.wrap_future(call(lambda: adapters.is_ready(hold.number)))
            if not is_there:
                await asyncio.sleep(POLL_SECONDS)
    except BaseException:
        call(lambda: adapters.release(hold))
        raise
    return hold
