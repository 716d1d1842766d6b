"""Decides how many pages the pool gets, and reports how the device's memory is divided.

Every number follows from the layout, the limits, the device's memory and the measured memory of steps.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

import torch

from outrider.cache.groups import MAX_PADDING, CacheLayout
from outrider.cache.kinds import MODEL_CACHE, RowCapacity
from outrider.config import CPU_CACHE_BYTES, CPU_CACHE_SHARE, EngineConfig
from outrider.core import Axis, Limits
from outrider.core.host_memory import available_bytes
from outrider.runner.interface import NoDeviceMemory
from outrider.runner.storages import collect_replaced
from outrider.runner.worker_ranks import ONE_RANK, WorkerRanks

log = logging.getLogger("outrider")
MIB = 1 << 20


@dataclass(frozen=True)
class StepMemory:
    """The memory that steps take in addition to weights and pages, as `runner.graphs.warm_up` measured and estimated
    it."""

    activation_bytes: int = 0  # memory of the largest step
    state_bytes: int = 0  # memory of rows, without that of recurrent layers
    graph_bytes: int = 0  # estimated memory of captured steps

    @property
    def total(self) -> int:
        return self.activation_bytes + self.state_bytes + self.graph_bytes


UNMEASURED = StepMemory()


class StepOutOfMemory(RuntimeError):
    """The device had no memory left for a step."""

    def __init__(self, error: Exception) -> None:
        super().__init__(
            "the device ran out of memory: lower max_num_batched_tokens or max_num_seqs (smaller steps), or "
            f"gpu_memory_utilization (a smaller cache) ({_first_line(error)})"
        )


@contextmanager
def enough_memory(what: str, advice: str) -> Iterator[None]:
    """A context in which an allocation without enough memory raises NoDeviceMemory, with advice about the settings.
    what: the purpose of the memory, for the message."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, OSError) as error:
        raise NoDeviceMemory(f"the device has no memory for {what}: {advice} ({_first_line(error)})") from error


def _first_line(error: Exception) -> str:
    return str(error).split(". ")[0].strip()


class FeatureBytes(NamedTuple):
    """Device memory that a feature takes, so that it is not available for pages."""

    buffers: int = 0  # made with each step; on a GPU they are measured with the largest one
    later: int = 0  # that it will take beside what it holds already


@dataclass(frozen=True)
class MemoryPlan:
    num_pages: int
    page_bytes: int
    weight_bytes: int
    packed_bytes: int
    padding: float
    tokens: int  # context tokens that the pool can hold in requests of max_len
    rows: RowCapacity  # what recurrent layers keep for one request
    num_rows: int
    max_drafts: int
    step: StepMemory = UNMEASURED
    stored_as: str = ""  # words for the types of the layers' caches
    feature_bytes: Mapping[str, FeatureBytes] = field(default_factory=dict)  # by the names of features

    def report(self) -> str:
        pool = self.num_pages * self.page_bytes
        lines = [
            f"weights {self.weight_bytes / MIB:.0f} MiB"
            + (f" + packed copies {self.packed_bytes / MIB:.0f} MiB" if self.packed_bytes else ""),
            f"cache {pool / MIB:.0f} MiB{self.stored_as}: {self.num_pages} pages of {self.page_bytes / 1024:.0f} KiB, "
            f"{self.tokens} tokens, padding {self.padding:.1%}",
        ]
        if self.rows.row_bytes:
            lines.append(
                f"recurrent state {self.num_rows * self.rows.row_bytes / MIB:.0f} MiB: {self.num_rows} rows of "
                f"{self.rows.row_bytes / 1024:.0f} KiB, of which {self.rows.window_bytes / 1024:.0f} for "
                f"{self.max_drafts} drafts; {self.rows.checkpoint_pages} pages a checkpoint"
            )
        if self.step.total:
            step = self.step
            lines.append(f"steps {step.activation_bytes / MIB:.0f} MiB, their graphs about "
                         f"{step.graph_bytes / MIB:.0f} MiB, rows {step.state_bytes / MIB:.0f} MiB")
        lines += [f"{name} {sum(room) / MIB:.0f} MiB" for name, room in self.feature_bytes.items() if any(room)]
        if self.padding > MAX_PADDING:
            lines.append(f"page padding of {self.padding:.1%} is above {MAX_PADDING:.0%}: please report this model")
        return "; ".join(lines)


def plan_memory(config: EngineConfig, layout: CacheLayout, limits: Limits, device: torch.device, *, weight_bytes: int,
                packed_bytes: int = 0, step: StepMemory = UNMEASURED, ranks: WorkerRanks = ONE_RANK,
                feature_bytes: Mapping[str, FeatureBytes] = MappingProxyType({})) -> MemoryPlan:
    """Plan how a device's memory is divided between weights, steps, features and pages. All ranks get the number of
    pages that the rank with the least memory has room for."""
    per_request = sum(group.kind.capacity(limits).max_pages for group in layout.groups)
    rows, num_rows = layout.recurrent.capacity(limits), limits.extent(Axis.ROWS)
    # Every row at its longest, with all the checkpoints it can hold. More would hold beginnings of prompts that ended:
    # it is taken if somebody gave the memory for it.
    most = (per_request + rows.max_checkpoints * rows.checkpoint_pages) * limits.max_requests + 1
    if config.num_pages is not None:
        num_pages = config.num_pages
    else:
        other_bytes = step.total + num_rows * rows.row_bytes + sum(room.later for room in feature_bytes.values())
        if device.type != "cuda":  # there they are measured with the rows
            other_bytes += sum(room.buffers for room in feature_bytes.values())
        budget = config.kv_cache_memory_bytes or _free_bytes(config, device, ranks) - other_bytes
        least = 2  # the null page and another
        num_pages = budget // layout.page_bytes
        if config.kv_cache_memory_bytes is None or not config.enable_prefix_caching:
            num_pages = min(most, num_pages)
        if num_pages < least and device.type == "cuda":
            raise ValueError(_no_room(config, device, budget, weight_bytes + packed_bytes, other_bytes))
        num_pages = max(least, num_pages)
    num_pages = min(ranks.link.gather(num_pages))
    tokens = (num_pages - 1) * limits.max_len // max(1, per_request)
    return MemoryPlan(num_pages, layout.page_bytes, weight_bytes, packed_bytes, layout.padding, tokens, rows, num_rows,
                      limits.max_drafts, step, _stored_as(layout), feature_bytes)


def _stored_as(layout: CacheLayout) -> str:
    """Describe for the report how layers store keys and values. Empty if all of them use the model's dtype."""
    layers: Counter[str] = Counter()
    for group in layout.groups:
        layers[group.spec.cache_type.name] += len(group.layers)
    if set(layers) == {MODEL_CACHE.name}:
        return ""
    names = {MODEL_CACHE.name: "the model's dtype"}
    return " (" + ", ".join(f"{count} layers in {names.get(name, name)}" for name, count in layers.items()) + ")"


def fit_max_len(config: EngineConfig, layout: CacheLayout, limits: Limits, plan: MemoryPlan) -> Limits:
    """Make sure that a request of max_len fits the pool, since it could otherwise wait for ever. If it does not fit, an
    automatic max_len is lowered, and one that the user gave is refused."""
    usable = plan.num_pages - 1

    def fits(length: int) -> bool:
        return sum(group.kind.pages_to_start(length, limits) for group in layout.groups) <= usable

    if fits(limits.max_len):
        return limits
    low = 0
    high = limits.max_len
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    if low < 1:
        raise ValueError(f"the cache holds {usable} pages besides one that stays empty, too few for one token: give it "
                         "more memory (num_pages, kv_cache_memory_bytes, gpu_memory_utilization)")
    if config.max_model_len is not None:
        raise ValueError(
            f"the cache holds {usable} pages, enough for one request of {low} tokens, and max_model_len is "
            f"{limits.max_len}: "
            f"lower max_model_len to {low}, or give the cache more memory (num_pages, kv_cache_memory_bytes, "
            "gpu_memory_utilization)"
        )
    log.warning("the cache holds one request of %d tokens, so max_model_len is lowered to that from the model's %d: "
                "longer answers end there (give the cache more memory: kv_cache_memory_bytes, num_pages)",
                low, limits.max_len)
    return replace(limits, max_len=low)


def release_dropped() -> None:
    """Free the memory of objects that are no longer used, and give GPU memory back to the driver. A garbage collection
    is needed, because parts of a model may refer to each other, and so do captured steps and the objects that choose
    among them."""
    collect_replaced()
    torch.cuda.empty_cache()


def _no_room(config: EngineConfig, device: torch.device, budget: int, weights: int, other: int) -> str:
    if config.kv_cache_memory_bytes is not None:
        return f"kv_cache_memory_bytes={config.kv_cache_memory_bytes} holds not one page: raise it"
    total = torch.cuda.mem_get_info(device)[1]
    return (
        f"nothing is left for the cache: of {total / MIB:.0f} MiB gpu_memory_utilization="
        f"{config.gpu_memory_utilization} allows {total * config.gpu_memory_utilization / MIB:.0f}, "
        f"weights take {weights / MIB:.0f}, steps and rows "
        f"{other / MIB:.0f}, and {max(0, -budget) / MIB:.0f} are missing: raise gpu_memory_utilization, lower "
        "max_num_batched_tokens or max_num_seqs, or free what else is on the device"
    )


def _free_bytes(config: EngineConfig, device: torch.device, ranks: WorkerRanks) -> int:
    """Return the bytes that this rank may still take on its device. Ranks on the same device wait until all of them
    have loaded, then read the free memory and share it."""
    ranks.link.gather(None)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        left = (int(total * config.gpu_memory_utilization) - (total - free)) // ranks.num_sharing
    else:
        left = min(CPU_CACHE_BYTES, int(available_bytes() * CPU_CACHE_SHARE)) // ranks.num_sharing
    ranks.link.gather(None)  # before another rank takes its part
    return left
