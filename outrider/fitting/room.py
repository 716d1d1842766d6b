"""DeviceRoom: how much memory a device has for an engine. The device may belong to this machine or to another."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from outrider.core.host_memory import available_bytes
from outrider.kernels.ops import operation
from outrider.runner.check import device_bytes
from outrider.runner.device import name_device

GIB = 1 << 30
MIB = 1 << 20
UNITS = {"": GIB, "G": GIB, "GIB": GIB, "GB": 10**9, "M": MIB, "MIB": MIB, "MB": 10**6}
CONTEXT_BYTES = 600 << 20  # that CUDA's context and libraries take of a GPU before the first tensor
NEWEST = (9, 0)  # the compute capability that a GPU elsewhere is taken to have


@dataclass(frozen=True)
class DeviceRoom:
    name: str  # for messages
    device: torch.device
    total_bytes: int
    free_bytes: int  # before the model is loaded
    capability: tuple[int, int] | None = None  # of a GPU
    is_here: bool = True  # whether it is this machine's

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def gpu_bytes(self) -> int | None:
        """The whole memory of a GPU; None for a CPU."""
        return self.total_bytes if self.is_gpu else None

    @property
    def converts_to_fp8(self) -> bool:
        return self.capability is None or self.capability >= operation.FP8_CAPABILITY

    @property
    def planned_capability(self) -> tuple[int, int] | None:
        """The compute capability of a GPU that is not in this machine, for `planning_for`; None if the device is here.
        """
        return None if self.is_here else self.capability

    def budget(self, utilization: float) -> int:
        """Return the bytes that an engine may take. On a GPU this is the share `utilization` of all its memory, less
        what other processes hold. On a CPU it is that share of the free memory."""
        if not self.is_gpu:
            return int(self.free_bytes * utilization)
        return int(self.total_bytes * utilization) - (self.total_bytes - self.free_bytes)


def room_of(device: torch.device) -> DeviceRoom:
    """Return the total and the currently free memory of one of this machine's devices."""
    if device.type != "cuda":
        return DeviceRoom(name_device(device), device, device_bytes(device), available_bytes())
    free, total = torch.cuda.mem_get_info(device)
    return DeviceRoom(name_device(device), device, total, free, torch.cuda.get_device_capability(device))


def room_of_size(total_bytes: int, capability: tuple[int, int] = NEWEST) -> DeviceRoom:
    """Describe a GPU of this size that is not in this machine and runs nothing else."""
    return DeviceRoom(f"a GPU of {total_bytes / GIB:.3g} GiB", torch.device("cuda"), total_bytes,
                      max(0, total_bytes - CONTEXT_BYTES), capability, is_here=False)


def read_size(text: str) -> int:
    """Parse a size of memory, such as 24GiB, 24G, 24 (GiB), 512MiB or 24GB, and return its bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if found is None or (found[2].upper() not in UNITS):
        raise ValueError(f"{text!r} is not a size of memory, such as 24GiB")
    number, unit = float(found[1]), found[2].upper()
    num_bytes = int(number * UNITS[unit])
    if num_bytes < MIB:
        raise ValueError(f"{text!r} is too little memory for any model: give a size such as 24GiB")
    return num_bytes
