"""Checks and choices of ranks on several machines before they connect: equal devices, and the network's interface."""

from __future__ import annotations

import fcntl
import ipaddress
import logging
import os
import socket
import struct
from pathlib import Path

import torch

from outrider.runner.device import name_device
from outrider.runner.rank_link import RankLink

GET_ADDRESS = 0x8915  # SIOCGIFADDR
log = logging.getLogger("outrider")


def check_alike(link: RankLink, device: torch.device) -> None:
    """Raise ValueError on every rank if the ranks' devices differ. Each rank computes norms and samples by itself.
    Devices with other instructions may round differently, and ranks would continue with different tokens."""
    own = (name_device(device) if device.type == "cuda"
           else f"a CPU with {torch.backends.cpu.get_cpu_capability()}")
    found = link.gather((link.rank, link.host.words, own))
    _, place, first = found[0]
    for rank, other, device_name in found:
        if device_name != first:
            raise ValueError(f"rank 0{place} has {first} and rank {rank}{other} {device_name}: all ranks need devices "
                             "of one kind" + ("" if device.type == "cuda" else ", or one ATEN_CPU_CAPABILITY"))


def use_interface_of(address: str) -> None:
    """Make torch.distributed use the interface that has this address, unless the environment names another."""
    name = interface_of(address)
    if name is None:
        log.warning("no interface has the address %s: torch.distributed chooses one (GLOO_SOCKET_IFNAME and "
                    "NCCL_SOCKET_IFNAME name another)", address)
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # exactly this one


def interface_of(address: str) -> str | None:
    """Return the name of the network interface with this address; None if it cannot be found."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    if wanted.is_loopback:
        return "lo"
    if wanted.version == 6:
        return _interface_of_ipv6(wanted)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(own.fileno(), GET_ADDRESS, struct.pack("256s", name.encode()))
            except OSError:  # it has no address
                continue
            if found[20:24] == wanted.packed:
                return name
    return None


def _interface_of_ipv6(wanted: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str | None:
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return None
    return next((line.split()[-1] for line in lines if line.split()[0] == wanted.packed.hex()), None)
