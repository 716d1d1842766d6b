"""Refuses models, drafters and lengths that cannot work, by their configs and sizes alone, before weights are read or
memory is allocated.

The check reads the model's outline: the same modules on torch's meta device, where tensors have shapes and no memory.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

from outrider import drafters
from outrider.config import EngineConfig
from outrider.drafters.base import DraftBuild
from outrider.layers.rotary import Unrotated
from outrider.models.base import Decoder, Model
from outrider.models.sources.model_source import ModelSource
from outrider.runner.cache_plan import check_cache_types
from outrider.runner.device import gpu_bytes
from outrider.runner.interface import NoDeviceMemory

GIB = 1 << 30
MOST_COUNTED = 100_000  # tensors of weights that are too large already: there may be millions
TABLE_COPIES = 2  # a table of positions is computed in blocks, which are then joined


def check_target(config: EngineConfig, source: ModelSource, outline: Model, device: torch.device) -> None:
    """Raise ValueError if the model cannot be served on the device with these settings. `outline`: the model on the
    meta device."""
    speculative = config.speculative
    limits = config.limits(gpu_bytes=gpu_bytes(device), max_positions=outline.max_positions,
                           vocab_size=outline.vocab_size,
                           max_drafts=0 if speculative is None else speculative.num_speculative_tokens)
    _check_weights(outline, device)
    check_cache_types(config, outline, device)
    if speculative is not None and config.shipped_drafter is None:  # which steps aside instead, where it does not fit
        build = DraftBuild(outline, outline.dtype, torch.device("meta"), 1, config.load_format, config.seed,
                           config.model)
        drafters.make_drafter(speculative, build)
    bytes_of_position = TABLE_COPIES * table_bytes(outline) + 4 * limits.max_requests / config.page_size
    needed, held = limits.max_len * bytes_of_position, min(device_bytes(device), device_bytes(torch.device("cpu")))
    if needed > held:
        asked = "max_model_len" if config.max_model_len is not None else "max_position_embeddings of its config"
        raise ValueError(f"{source.config_file}: tables for {limits.max_len} positions ({asked}) take "
                         f"{needed / GIB:.0f} GiB, and the device has {held / GIB:.0f}: set max_model_len to the "
                         "longest request that you serve")


def table_bytes(outline: Model) -> int:
    """Return the bytes that the model's rope tables and other tables of positions take for each position."""
    rotaries = outline.rotaries if isinstance(outline, Decoder) else ()
    tables = [rotary.table for rotary in rotaries if not isinstance(rotary, Unrotated)]
    return sum(table.shape[1] * table.element_size() for table in tables)


def _check_weights(outline: Model, device: torch.device) -> None:
    held, total, counted, is_whole = device_bytes(device), 0, set[str](), True
    for prefix, part in outline.parts():
        if total > held and len(counted) > MOST_COUNTED:
            is_whole = False
            break
        for name, slot in part.weights(prefix).items():
            if name not in counted:
                total += slot.nbytes
                counted.add(name)
    if total > held:
        least = "" if is_whole else "at least "
        raise NoDeviceMemory(f"the weights take {least}{total / GIB:.1f} GiB as {str(outline.dtype)[6:]}, and the "
                             f"device has {held / GIB:.1f}: choose a smaller model or dtype, or another device")


def device_bytes(device: torch.device) -> int:
    """Return the total memory of a device, free or not. For a CPU swap space counts too."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    swap = re.search(r"SwapTotal:\s*(\d+) kB", _read("/proc/meminfo"))
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") + (1024 * int(swap[1]) if swap else 0)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:  # another system
        return ""
