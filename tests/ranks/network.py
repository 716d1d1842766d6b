"""Hosts for tests: network namespaces of this machine, joined by a bridge. Needs root and iproute2."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

PREFIX = "10.213.77"
BRIDGE = "orbr"


def ip(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, check=check)


class Hosts:
    """Hosts 0 to n - 1, at PREFIX.1 to PREFIX.n. This process reaches them over the bridge."""

    def __init__(self, count: int) -> None:
        self.count = count
        ip("ip", "link", "add", BRIDGE, "type", "bridge")
        ip("ip", "addr", "add", f"{PREFIX}.254/24", "dev", BRIDGE)
        ip("ip", "link", "set", BRIDGE, "up")
        for host in range(count):
            ip("ip", "netns", "add", self.name(host))
            ip("ip", "link", "add", f"orv{host}", "type", "veth", "peer", "name", "eth0", "netns", self.name(host))
            ip("ip", "link", "set", f"orv{host}", "master", BRIDGE)
            ip("ip", "link", "set", f"orv{host}", "up")
            self.inside(host, "ip", "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            self.inside(host, "ip", "link", "set", "eth0", "up")
            self.inside(host, "ip", "link", "set", "lo", "up")

    @staticmethod
    def name(host: int) -> str:
        return f"orhost{host}"

    @staticmethod
    def address(host: int) -> str:
        return f"{PREFIX}.{host + 1}"

    def inside(self, host: int, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return ip("ip", "netns", "exec", self.name(host), *words, check=check)

    def listening(self, host: int) -> set[tuple[str, int]]:
        """The addresses and ports at which the host's processes listen."""
        lines = self.inside(host, "ss", "-ltnH").stdout.splitlines()
        found = [line.split()[3].rpartition(":") for line in lines]
        return {(address, int(port)) for address, _, port in found}

    def cut_off(self, host: int) -> None:
        ip("ip", "link", "set", f"orv{host}", "down")

    def connect(self, host: int) -> None:
        ip("ip", "link", "set", f"orv{host}", "up")

    def slow_down(self, host: int) -> None:
        """Delay and lose what the host sends, or limit its bytes where the kernel cannot."""
        queue = ("tc", "qdisc", "replace", "dev", "eth0", "root")
        if self.inside(host, *queue, "netem", "delay", "10ms", "5ms", "loss", "1%", check=False).returncode:
            self.inside(host, *queue, "tbf", "rate", "400kbit", "burst", "16kbit", "latency", "400ms")

    def speed_up(self, host: int) -> None:
        self.inside(host, "tc", "qdisc", "del", "dev", "eth0", "root")


def remove(count: int) -> None:
    for host in range(count):
        ip("ip", "netns", "del", Hosts.name(host), check=False)
        ip("ip", "link", "del", f"orv{host}", check=False)
    ip("ip", "link", "del", BRIDGE, check=False)


@contextmanager
def hosts(count: int) -> Iterator[Hosts]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    remove(count)
    try:
        try:
            made = Hosts(count)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine makes no network namespaces: {error.stderr}")
        yield made
    finally:
        remove(count)
