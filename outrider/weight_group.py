"""WeightGroup: brings tensors from a trainer's process to a server's, one at a time, through the memory of both hosts.

The two processes are a process group of torch's with the backend gloo. NCCL would need a GPU for each of them. The
trainer is rank 0 and listens at its address; the server is rank 1. `outrider.compat.weight_transfer` has the trainer's
end, `outrider.server.weight_receiver` the server's.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import distributed

TRAINER, SERVER, NUM_PROCESSES = 0, 1, 2
JOIN_SECONDS = 60.0  # until both processes are there
WAIT_SECONDS = 600.0  # for a tensor, which a trainer may first have to gather


class WeightGroup:
    """This process's end of the connection between trainer and server."""

    def __init__(self, host: str, port: int, rank: int, join_seconds: float = JOIN_SECONDS,
                 wait_seconds: float = WAIT_SECONDS) -> None:
        """Join the other process. Raises ConnectionError if it does not connect in time."""
        try:
            self.store: object = distributed.TCPStore(host, port, NUM_PROCESSES, is_master=rank == TRAINER,
                                                      timeout=timedelta(seconds=join_seconds))
            self._group = distributed.ProcessGroupGloo(self.store, rank, NUM_PROCESSES,
                                                       timedelta(seconds=wait_seconds))
        except (RuntimeError, ValueError, OSError) as error:
            raise ConnectionError(f"the trainer and the server cannot connect at {host}:{port}: check the address. "
                                  f"{str(error).splitlines()[0]}") from None
        self.socket: object = None  # of vLLM's group; TRL sets it and the store to None when it closes

    def send(self, tensor: torch.Tensor) -> None:
        self._broadcast(tensor.detach().to("cpu").contiguous())

    def receive(self, dtype: str, shape: Sequence[int]) -> torch.Tensor:
        """Receive the next tensor from the trainer. Raises ConnectionError if the trainer has ended."""
        tensor = torch.empty(tuple(shape), dtype=getattr(torch, dtype))
        self._broadcast(tensor)
        return tensor

    def _broadcast(self, tensor: torch.Tensor) -> None:
        if not tensor.numel():
            return
        try:
            self._group.broadcast(tensor.reshape(-1).view(torch.uint8), TRAINER).wait()
        except RuntimeError as error:
            raise ConnectionError(f"the other process has ended or does not respond: {str(error).splitlines()[0]}"
                                  ) from None
