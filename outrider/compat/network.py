"""Addresses for the processes of a script, like those of vLLM's helpers. No torch."""

from __future__ import annotations

import socket


def get_open_port() -> int:
    """A TCP port that is free right now."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def get_ip() -> str:
    """This machine's address on the network, or a loopback address without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # which sends nothing
        try:
            probe.connect(("8.8.8.8", 80))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def get_distributed_init_method(ip: str, port: int) -> str:
    """The address for torch.distributed.init_process_group."""
    return f"tcp://[{ip}]:{port}" if ":" in ip else f"tcp://{ip}:{port}"
