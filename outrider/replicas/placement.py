"""Assigns devices and a number of threads to each replica on this machine, as environment variables."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

from outrider.core.host_cores import num_cores

VISIBLE = "CUDA_VISIBLE_DEVICES"
COUNT_SECONDS = 120.0


def visible_devices(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Names of the GPUs that processes on this machine may use, in the form of CUDA_VISIBLE_DEVICES. torch is asked in
    a separate process, because it takes memory and time that the front does not need."""
    program = "import torch; print(torch.cuda.device_count())"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=COUNT_SECONDS,
                           check=False, env=dict(environment))
    num_devices = int(found.stdout) if found.returncode == 0 else 0
    named = [name.strip() for name in environment.get(VISIBLE, "").split(",") if name.strip()]
    return (named or [str(number) for number in range(num_devices)])[:num_devices]


def replica_environments(device: str, num_replicas: int, devices_each: int, visible: list[str],
                         environment: Mapping[str, str] = os.environ) -> list[dict[str, str]]:
    """The environment variables of each replica. If the user named a device (cuda:0), all replicas share it. Raises
    ValueError if there are fewer GPUs than the replicas need."""
    if device == "cpu" or (device == "auto" and not visible):
        threads = environment.get("OMP_NUM_THREADS", str(max(1, num_cores() // num_replicas)))
        return [{"OMP_NUM_THREADS": threads} for _ in range(num_replicas)]
    if device.startswith("cuda:"):
        return [{} for _ in range(num_replicas)]
    if len(visible) < num_replicas * devices_each:
        raise ValueError(f"{num_replicas} replicas with {devices_each} GPU each need {num_replicas * devices_each} "
                         f"GPUs, and there are {len(visible)}: use fewer replicas, or let all share one by --device "
                         "cuda:0 with a smaller --gpu-memory-utilization")
    return [{VISIBLE: ",".join(visible[i * devices_each : (i + 1) * devices_each])} for i in range(num_replicas)]
