"""Nodes for tests: agents of `outrider serve --node-rank` as processes of this machine, each with a loopback address of
its own, and peers that are none."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from outrider.config import EngineConfig
from outrider.engine.hosts.host_agent import OWN_ADDRESS
from outrider.engine.start import start_engine
from outrider.llm import LLM
from tests.ranks.test_engine import SETTINGS

SECRET = "a secret of these tests"
PATIENCE = 580.0  # seconds: what takes longer never comes, however busy the machine is


def free_port(address: str = "127.0.0.1") -> int:
    """A free port below those that systems give to connections: nobody takes it before node 0 does."""
    while True:
        port = random.randrange(20_000, 30_000)
        try:
            socket.create_server((address, port)).close()
        except OSError:
            continue
        return port


class Agent:
    """A node's process. Its lines are kept."""

    def __init__(self, model: str, node: int, settings: dict[str, Any]) -> None:
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), OWN_ADDRESS: f"127.0.0.{node + 1}",
                                    "OUTRIDER_RANK_TOKEN": SECRET}
        self.lines: list[str] = []
        self.process = subprocess.Popen([sys.executable, "-m", "tests.ranks.node_agent", model,
                                         json.dumps(settings | {"node_rank": node})], env=environment,
                                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(self.process.stdout)

    def wait_for(self, words: str, count: int = 1) -> str:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            found = [line for line in list(self.lines) if words in line]
            if len(found) >= count:
                return found[count - 1]
            time.sleep(0.05)
        raise AssertionError(f"{words!r} did not come: {self.lines}")

    @property
    def rank_ids(self) -> list[int]:
        children = psutil.Process(self.process.pid).children()
        return [own.pid for own in children if "spawn_main" in " ".join(own.cmdline())]

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        finally:
            self.process.kill()


@contextmanager
def agents(model: str, num_nodes: int, settings: dict[str, Any]) -> Iterator[list[Agent]]:
    running = [Agent(model, node, settings) for node in range(1, num_nodes)]
    try:
        yield running
    finally:
        for own in running:
            own.end()


def over_nodes(num_ranks: int, num_nodes: int = 2, **settings: Any) -> dict[str, Any]:
    return {**SETTINGS, "tensor_parallel_size": num_ranks, "nnodes": num_nodes, "master_port": free_port(), **settings}


def start_front(model: str, settings: dict[str, Any]) -> LLM:
    return LLM.around(start_engine(EngineConfig(model, **settings)))


def garble(address: str, port: int) -> None:
    """Send bytes of no meaning: some, many, a half of a handshake and none."""
    for data in (b"", b"\0", os.urandom(64), b"GET / HTTP/1.1\r\n\r\n", os.urandom(300_000)):
        try:
            with socket.create_connection((address, port), 5) as own:
                own.sendall(data)
        except OSError:  # it has hung up before it read all
            continue


def listening_ports(pids: list[int]) -> set[tuple[str, int]]:
    found = set()
    for pid in pids:
        for one in psutil.Process(pid).net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN:
                found.add((one.laddr.ip, one.laddr.port))
    return found
