"""How often what failed is started again, and after how long."""

from __future__ import annotations

import asyncio

import pytest

from outrider.async_llm import AsyncLLM
from outrider.server import engine_host
from outrider.server.engine_host import EngineHost, Failed
from outrider.server.restarts import WINDOW_SECONDS, Restarts


def test_waits_grow_and_are_bounded() -> None:
    restarts = Restarts(6)
    assert [restarts.next_wait(float(i)) for i in range(7)] == [1, 4, 16, 60, 60, 60, None]


def test_restarts_that_are_long_over_count_no_more() -> None:
    restarts = Restarts(2)
    assert [restarts.next_wait(now) for now in (0.0, 1.0, 2.0)] == [1, 4, None]
    assert restarts.next_wait(WINDOW_SECONDS + 0.5) == 4 and restarts.next_wait(WINDOW_SECONDS + 0.6) is None
    assert restarts.next_wait(3 * WINDOW_SECONDS) == 1
    assert Restarts(0).next_wait(0.0) is None and Restarts(10**6).next_wait(0.0) == 1


def test_an_engine_that_does_not_start_again_is_given_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three restarts at once would all meet the device's memory while another process still holds it."""
    waits: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        waits.append(seconds)
        await sleep(0)

    def fail() -> AsyncLLM:
        raise MemoryError("no memory yet")

    monkeypatch.setattr(engine_host.asyncio, "sleep", note)
    host = EngineHost(fail, max_restarts=3)
    host.num_restarts = 1  # it has served before
    asyncio.run(host.run())
    assert isinstance(host.state, Failed) and waits == [0, 1, 4, 16]
