"""A server whose engine has two ranks: a killed rank ends its streams with an answer that names it, and all ranks start
again."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tests.ranks.test_engine import wait_for_end
from tests.server.rig import PATIENCE
from tests.server.test_serve import folder, started, wait_healthy

__all__ = ["folder"]  # a fixture
KEY = {"Authorization": "Bearer k"}
BODY = {"model": "tiny-bytes", "prompt": "The sea", "max_tokens": 60, "temperature": 0, "ignore_eos": True}


def ranks_of(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children() if "spawn_main" in " ".join(child.cmdline())]


@pytest.mark.long
def test_a_server_starts_all_ranks_again(folder: Path) -> None:
    process, url = started(folder, "-tp", "2")
    try:
        wait_healthy(process, url)
        first = httpx.post(f"{url}/v1/completions", json=BODY, headers=KEY, timeout=PATIENCE).json()
        ranks = ranks_of(process.pid)
        assert len(ranks) == 2
        with httpx.stream("POST", f"{url}/v1/completions", json=BODY | {"stream": True}, headers=KEY,
                          timeout=PATIENCE) as stream:
            lines = stream.iter_lines()
            next(lines)
            psutil.Process(ranks[1]).kill()
            rest = "\n".join(lines)
        assert "rank 1 died" in rest or rest.endswith("data: [DONE]\n"), rest
        wait_for_end(ranks)
        end = time.monotonic() + PATIENCE
        while len(ranks_of(process.pid)) < 2 and time.monotonic() < end:
            time.sleep(0.05)
        wait_healthy(process, url)
        again = httpx.post(f"{url}/v1/completions", json=BODY, headers=KEY, timeout=PATIENCE).json()
        assert again["choices"][0]["text"] == first["choices"][0]["text"]
        ranks = ranks_of(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
        wait_for_end(ranks)
    finally:
        process.kill()
