"""Chooses the device and the dtype that a model runs in, from the settings, the machine and the checkpoint."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import torch

from outrider.models.sources.model_source import ModelSource

log = logging.getLogger("outrider")
CPU_INFO = Path("/proc/cpuinfo")
# The names that Linux has for instructions which compute in a narrow type, on x86 and on ARM.
INSTRUCTIONS = {
    "bfloat16": {"avx512_bf16", "amx_bf16", "bf16", "svebf16"},
    "float16": {"avx512_fp16", "amx_fp16", "asimdhp"},
}


def cpu_computes_in(dtype: str) -> bool | None:
    """Whether the CPU has instructions for this dtype; None if this cannot be found out."""
    if dtype not in INSTRUCTIONS:
        return True
    try:
        found = re.search(r"^(?:flags|Features)\s*:(.*)$", CPU_INFO.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    return None if found is None else not INSTRUCTIONS[dtype].isdisjoint(found[1].split())


def name_device(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"CPU, {torch.get_num_threads()} threads"


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError("device='cuda', but this machine has no CUDA device that torch can use; use device='cpu'")
    return torch.device(name)


def gpu_bytes(device: torch.device) -> int | None:
    """Return the total memory of a GPU; None for a CPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def pick_dtype(name: str, source: ModelSource, device: torch.device) -> torch.dtype:
    """Return the dtype of the model. "auto" on a GPU is the checkpoint's dtype, or bfloat16 for quantised GGUF files;
    on a CPU it is float32, because narrower types are slower there."""
    if name == "auto":
        name = str(source.config.get("dtype") or source.config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
        if device.type == "cpu":
            if name != "float32":
                log.info("%s is computed in float32, which is faster on a CPU than %s", source.name, name)
            name = "float32"
    elif device.type == "cpu" and cpu_computes_in(name) is False:
        log.warning("dtype=%r: this CPU has no instructions for it, so steps take several times as long as in float32: "
                    "use dtype='float32' or 'auto' unless the memory is too small", name)
    if device.type != "cpu" and name == "float64":
        raise ValueError("dtype='float64' is for exact checks on the CPU; use dtype='float32' or 'bfloat16' on a GPU")
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
            "float64": torch.float64}[name]
