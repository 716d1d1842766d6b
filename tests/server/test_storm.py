"""Hundreds of clients of every temper at once, a worker that is killed, a SIGTERM in the middle.

Everybody gets an answer, no page is lost, only injected failures are the server's fault, and memory stays bounded.
"""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import threading
import time
from collections import deque
from pathlib import Path

import httpx
import psutil
import pytest

from tests.server.rig import PATIENCE, serving
from tests.server.storm import Storm
from tests.server.test_serve import folder, is_healthy, started, wait_healthy

__all__ = ["folder"]  # a fixture
MIB = 1 << 20
SETTINGS = ["--max-num-seqs", "16", "--num-pages", "200", "--max-num-queued-reqs", "400", "--max-restarts", "100",
            "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}']


def test_five_hundred_clients_at_once() -> None:
    """In this process, so that the engine itself can be asked afterwards."""
    with serving(max_num_queued_reqs=700) as served:
        storm = Storm(served.url, seed=1, max_len=200)
        asyncio.run(storm.run(500, concurrency=500))
        assert storm.statuses[200] > 150 and not storm.statuses.keys() - {200, 429}, storm.statuses
        assert min(storm.ends[kind] for kind in ("stream", "whole", "left", "refused", "embedding")) > 0, storm.ends
        served.assert_idle()


@pytest.mark.parametrize(("num_requests", "deaths"), [(150, [4]), pytest.param(20_000, [2, 5, 8],
                                                                               marks=pytest.mark.long)])
def test_a_worker_that_dies_and_a_server_that_is_told_to_end(folder: Path, num_requests: int,
                                                             deaths: list[int]) -> None:
    """A worker is killed in the middle of some of the tenths. Memory is compared with what it was after the
    first tenth, when everything had been used once."""
    process, url = started(folder, *SETTINGS)
    assert process.stderr is not None
    said: deque[str] = deque(maxlen=1000)
    threading.Thread(target=said.extend, args=(process.stderr,), daemon=True).start()  # a full pipe would stop it
    try:
        wait_healthy(process, url)
        storm, resident = Storm(url, seed=2, max_len=96, key="k"), 0
        for tenth in range(10):
            asyncio.run(with_a_death(storm, process, num_requests // 10, dies=tenth in deaths))
            while number(url, "engine_restarts_total") < sum(death <= tenth for death in deaths):
                time.sleep(0.05)
            wait_idle(process, url)
            if tenth == 0:
                resident = psutil.Process(process.pid).memory_info().rss
        grown = psutil.Process(process.pid).memory_info().rss - resident
        assert grown < 50 * MIB, f"{grown / MIB:.0f} MiB more than after the first tenth"
        assert not storm.statuses.keys() - {200, 429, 503} and storm.statuses[200] > num_requests // 5, storm.statuses
        assert number(url, "engine_restarts_total") == len(deaths)
        asyncio.run(ended_in_the_middle(process, url))
        assert process.wait(PATIENCE) == 0
    except BaseException as error:
        error.add_note("the server's last messages:\n" + "".join(said))
        raise
    finally:
        process.kill()


async def with_a_death(storm: Storm, process: subprocess.Popen[str], num_requests: int, *, dies: bool) -> None:
    run = asyncio.ensure_future(storm.run(num_requests, concurrency=min(num_requests, 500)))
    if dies:
        await asyncio.sleep(0.2)
        worker_of(process).kill()
    await run


async def ended_in_the_middle(process: subprocess.Popen[str], url: str) -> None:
    """Requests that were admitted when the server was told to end get whole answers."""
    storm = Storm(url, seed=3, max_len=96, key="k")
    clients = [asyncio.ensure_future(storm.patient(max_tokens=60, n=1)) for _ in range(40)]
    async with httpx.AsyncClient(base_url=url, headers={"Authorization": "Bearer k"}, timeout=PATIENCE) as http:
        while (await http.get("/load")).json()["server_load"] + storm.ends["stream"] < 40:
            await asyncio.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    await asyncio.gather(*clients)
    assert storm.ends["stream"] == 40, (storm.ends, storm.statuses)


def worker_of(process: subprocess.Popen[str]) -> psutil.Process:
    return next(c for c in psutil.Process(process.pid).children() if "spawn_main" in " ".join(c.cmdline()))


def number(url: str, name: str) -> float:
    text = httpx.get(f"{url}/metrics", headers={"Authorization": "Bearer k"}, timeout=PATIENCE).text
    found = re.search(rf"^vllm:{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE)
    return -1.0 if found is None else float(found[1])


def wait_idle(process: subprocess.Popen[str], url: str) -> None:
    """Loaded, with no sample and no page in use."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        assert process.poll() is None
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        if [number(url, name) for name in names] == [0.0, 0.0, 0.0] and is_healthy(url):
            return
        time.sleep(0.05)
    raise AssertionError("not idle in time")
