"""Joins the ranks of a worker (tensor parallelism): makes the torch.distributed group in which layers sum over ranks,
and picks each rank's device."""

from __future__ import annotations

import os
import socket
import sys
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from outrider.core.lazy_exports import LateModule
from outrider.runner.device import pick_device
from outrider.runner.rank_link import RankLink
from outrider.runner.rank_status import RankStatus
from outrider.runner.ranks import ProcessRanks
from outrider.runner.worker_ranks import DEVICE_SECONDS, ONE_RANK, WatchedRanks, WorkerRanks

if TYPE_CHECKING:
    from outrider.runner import device_ranks as on_devices
    from outrider.runner import nodes
else:
    on_devices = LateModule("outrider.runner.device_ranks")  # with Triton, which a CPU need not have
    nodes = LateModule("outrider.runner.nodes")

# The parent watches the ranks and ends them much earlier than a sum gives up; during start-up one rank may read its
# weights for long while another waits in a sum.
GROUP_SECONDS = 24 * 3600
MAX_DEVICE_RANKS = 16  # that sum through each other's memory
SHARED_DEVICE = "OUTRIDER_RANKS_SHARE_DEVICE"  # tests: set to 1, all ranks use the first CUDA device


def device_of_rank(name: str, link: RankLink) -> str:
    """Return the setting `device` for one rank: its own CUDA device, or the CPU that all ranks share."""
    device = pick_device(name)
    if link.count == 1 or device.type != "cuda":
        return name
    if device.index is not None:
        raise ValueError(f"device={name!r} names one device, and tensor_parallel_size={link.count} uses several: use "
                         "device='cuda', and choose devices with CUDA_VISIBLE_DEVICES")
    if _shares_device():
        return "cuda:0"
    found = torch.cuda.device_count()
    if link.num_local > found:
        raise ValueError(f"tensor_parallel_size={link.count}, and this machine has {found} CUDA device"
                         f"{'s' * (found != 1)} that torch can use: use at most {found * link.host.num_nodes} ranks")
    return f"cuda:{link.rank % link.num_local}"


def join_ranks(link: RankLink, status: RankStatus, device_name: str) -> WorkerRanks:
    """Connect to the other ranks. `device_name`: a setting as `device_of_rank` returns it."""
    if link.count == 1:
        return ONE_RANK
    device = pick_device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // link.num_local))  # ranks share the cores
    is_shared = device.type != "cuda" or _shares_device()
    uses_memory = link.count <= MAX_DEVICE_RANKS and all(link.gather(_reaches_all(device, link)))
    if link.host.num_nodes > 1:
        nodes.check_alike(link, device)
        nodes.use_interface_of(link.host.address)
    elif sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
    seconds = timedelta(seconds=GROUP_SECONDS)
    own = _listening_store(link.host.address) if link.rank == 0 else None
    address, port = link.decide(lambda: (link.host.address, own.port if own is not None else 0))
    store = own or dist.TCPStore(address, port, is_master=False, timeout=seconds)
    backend = "gloo" if uses_memory or device.type != "cuda" else "nccl"
    dist.init_process_group(backend, store=store, rank=link.rank, world_size=link.count,
                            timeout=seconds)
    num_sharing = link.num_local if is_shared else 1
    if not uses_memory:
        return WorkerRanks(link, WatchedRanks(ProcessRanks(), status), num_sharing)
    device_ranks = on_devices.DeviceRanks(device, DEVICE_SECONDS)
    return WorkerRanks(link, WatchedRanks(device_ranks, status), num_sharing, device_ranks)


def _listening_store(address: str) -> dist.TCPStore:
    """Make the store in which ranks find each other. It listens at the given address alone; the system chooses the
    port, so that no other program can hold it."""
    family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
    listener = socket.create_server((address, 0), family=family, backlog=128)
    port = listener.getsockname()[1]
    return dist.TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _reaches_all(device: torch.device, link: RankLink) -> bool:
    """Whether the rank's GPU can read the memory of all other ranks' GPUs."""
    if device.type != "cuda" or link.host.num_nodes > 1:
        return False
    others = [other for other in range(link.count) if other != link.rank]
    return _shares_device() or all(torch.cuda.can_device_access_peer(device, other) for other in others)


def _shares_device() -> bool:
    return os.environ.get(SHARED_DEVICE) == "1"
