"""WeightGroup: brings tensors from a trainer's process to servers, one at a time.

The processes are a process group of torch's. The trainer is rank 0 and listens at its address; every server has a rank
of its own. `outrider.compat.weight_transfer` has the trainer's end, `outrider.server.weight_receiver` a server's.
Tensors go through the memory of the hosts (gloo), unless every process has named a GPU and no two of them the same one
(NCCL).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import distributed

TRAINER, SERVER, NUM_PROCESSES = 0, 1, 2  # the ranks of a trainer with one server
JOIN_SECONDS = 60.0  # until all processes are there
WAIT_SECONDS = 600.0  # for a tensor, which a trainer may first have to gather
HOST = "host"


class WeightGroup:
    """This process's end of the connection between trainer and server."""

    def __init__(self, host: str, port: int, rank: int, num_processes: int = NUM_PROCESSES, *,
                 device: str | None = None, join_seconds: float = JOIN_SECONDS,
                 wait_seconds: float = WAIT_SECONDS) -> None:
        """Join the other processes. Raises ConnectionError if they do not come in time. device: the GPU of this process
        for NCCL; None: the host's memory."""
        try:
            store = distributed.TCPStore(host, port, num_processes, is_master=rank == TRAINER,
                                         timeout=timedelta(seconds=join_seconds))
            places = _exchange(store, rank, num_processes, _place(device))
            self._device = torch.device(device if device is not None and can_use_nccl(places) else "cpu")
            self._group = _make_group(store, rank, num_processes, timedelta(seconds=wait_seconds), self._device)
        except (RuntimeError, ValueError, OSError) as error:
            raise ConnectionError(f"the trainer and its servers do not reach each other at {host}:{port}: "
                                  f"{str(error).splitlines()[0]}") from None
        self.store: object = store
        self.socket: object = None  # of vLLM's group; TRL sets it and the store to None when it closes

    def send(self, tensor: torch.Tensor) -> None:
        self._broadcast(tensor.detach().to(self._device).contiguous())

    def receive(self, dtype: str, shape: Sequence[int]) -> torch.Tensor:
        """The next tensor that the trainer sends, in the host's memory. Raises ConnectionError if the trainer has
        ended."""
        tensor = torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=self._device)
        self._broadcast(tensor)
        return tensor.cpu()

    def _broadcast(self, tensor: torch.Tensor) -> None:
        if not tensor.numel():
            return
        try:
            self._group.broadcast(tensor.reshape(-1).view(torch.uint8), TRAINER).wait()
        except RuntimeError as error:
            raise ConnectionError(f"another process has ended or sends nothing: {str(error).splitlines()[0]}") from None


def can_use_nccl(places: Sequence[str]) -> bool:
    """Whether every process has a GPU of its own, as NCCL needs. places: the GPU that each process has named."""
    return HOST not in places and len(set(places)) == len(places)


def _place(device: str | None) -> str:
    return HOST if device is None else str(torch.cuda.get_device_properties(device).uuid)


def _exchange(store: distributed.Store, rank: int, num_processes: int, own: str) -> list[str]:
    """Tell the other processes a text, and return those of all."""
    store.set(f"place/{rank}", own)
    return [store.get(f"place/{each}").decode() for each in range(num_processes)]


def _make_group(store: distributed.Store, rank: int, size: int, timeout: timedelta,
                device: torch.device) -> distributed.ProcessGroup:
    if device.type == "cpu":
        return distributed.ProcessGroupGloo(store, rank, size, timeout)
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return distributed.ProcessGroupNCCL(store, rank, size, options)
