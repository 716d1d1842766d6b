"""Which device and which dtype a model runs in, from the settings, the machine and the checkpoint."""

from __future__ import annotations

import torch

from outrider.models.sources.base import ModelSource


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError("device='cuda', but this machine has no CUDA device that torch can use; use device='cpu'")
    return torch.device(name)


def pick_dtype(name: str, source: ModelSource, device: torch.device) -> torch.dtype:
    """Auto: as the checkpoint says on a GPU; float32 on a CPU, where narrower types are slow."""
    if name == "auto":
        name = str(source.config.get("dtype") or source.config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
        if device.type == "cpu":
            name = "float32"
    if device.type != "cpu" and name == "float64":
        raise ValueError("dtype='float64' is for exact checks on the CPU; use float32 or bfloat16 on a GPU")
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
            "float64": torch.float64}[name]
