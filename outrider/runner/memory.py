"""Decides how many pages the KV cache pool gets, and reports how the device's memory is divided.

Every number follows from the cache layout, the limits, the device's memory and the measured memory of steps.
"""

from __future__ import annotations

import gc
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
from outrider.runner.interface import NoDeviceMemory, StepOutOfMemory
from outrider.runner.worker_ranks import ONE_RANK, WorkerRanks

log = logging.getLogger("outrider")
MIB = 1 << 20
HOST_LACK = "DefaultCPUAllocator: can't allocate memory"  # what torch says of the host's memory
LEAST_PAGES = 2  # the null page and another


@dataclass(frozen=True)
class StepMemory:
    """The memory that steps take in addition to weights and pages, as `runner.graphs.warm_up` measured and estimated
    it."""

    activation_bytes: int = 0  # memory of the largest step
    state_bytes: int = 0  # memory of rows, without that of recurrent layers
    graph_bytes: int = 0  # estimated memory of captured steps
    later_bytes: int = 0  # memory of rows that the first request with a penalty or a mask allocates

    @property
    def total(self) -> int:
        return self.activation_bytes + self.state_bytes + self.graph_bytes + self.later_bytes


UNMEASURED = StepMemory()


def step_out_of_memory(error: Exception) -> StepOutOfMemory:
    """Return the error of a step for which there was no memory, with advice about the settings."""
    return StepOutOfMemory(
        "the device ran out of memory: lower max_num_batched_tokens or max_num_seqs (smaller steps), or "
        f"gpu_memory_utilization (a smaller cache) ({_first_line(error)})"
    )


@contextmanager
def naming_lack_of_memory() -> Iterator[None]:
    """A context for a step: an allocation that fails inside it, on the device or the host, raises StepOutOfMemory."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise step_out_of_memory(error) from error
    except RuntimeError as error:
        if HOST_LACK not in str(error):
            raise
        raise step_out_of_memory(error) from error


@contextmanager
def enough_memory(what: str, advice: str) -> Iterator[None]:
    """A context for start-up: an allocation that fails inside it raises NoDeviceMemory, with advice about the settings.
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

    @classmethod
    def from_pages(cls, num_pages: int, layout: CacheLayout, limits: Limits, *, weight_bytes: int,
                   packed_bytes: int = 0, step: StepMemory = UNMEASURED,
                   feature_bytes: Mapping[str, FeatureBytes] = MappingProxyType({})) -> MemoryPlan:
        tokens = (num_pages - 1) * limits.max_len // max(1, _pages_of_request(layout, limits))
        return cls(num_pages, layout.page_bytes, weight_bytes, packed_bytes, layout.padding, tokens,
                   layout.recurrent.capacity(limits), limits.extent(Axis.ROWS), limits.max_drafts, step,
                   _stored_as(layout), feature_bytes)

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
            rows = step.state_bytes + step.later_bytes
            lines.append(f"steps {step.activation_bytes / MIB:.0f} MiB, their graphs about "
                         f"{step.graph_bytes / MIB:.0f} MiB, rows {rows / MIB:.0f} MiB")
        lines += [f"{name} {sum(room) / MIB:.0f} MiB" for name, room in self.feature_bytes.items() if any(room)]
        if self.padding > MAX_PADDING:
            lines.append(f"page padding of {self.padding:.1%} is above {MAX_PADDING:.0%}: please report this model")
        return "; ".join(lines)


def plan_memory(config: EngineConfig, layout: CacheLayout, limits: Limits, device: torch.device, *, weight_bytes: int,
                packed_bytes: int = 0, step: StepMemory = UNMEASURED, ranks: WorkerRanks = ONE_RANK,
                feature_bytes: Mapping[str, FeatureBytes] = MappingProxyType({})) -> MemoryPlan:
    """Plan how a device's memory is divided between weights, steps, features and pages. All ranks get the number of
    pages that the rank with the least memory has room for."""
    other_bytes = taken_beside_pages(layout, limits, step, feature_bytes, on_gpu=device.type == "cuda")
    num_pages = config.num_pages
    if num_pages is None:
        budget = config.kv_cache_memory_bytes or _free_bytes(config, device, ranks) - other_bytes
        num_pages = pages_within(config, layout, limits, budget)
        if num_pages < LEAST_PAGES and device.type == "cuda":
            raise NoDeviceMemory(_no_room(config, device, budget, weight_bytes + packed_bytes, other_bytes))
        num_pages = max(LEAST_PAGES, num_pages)
    return MemoryPlan.from_pages(min(ranks.link.gather(num_pages)), layout, limits, weight_bytes=weight_bytes,
                                 packed_bytes=packed_bytes, step=step, feature_bytes=feature_bytes)


def taken_beside_pages(layout: CacheLayout, limits: Limits, step: StepMemory,
                       feature_bytes: Mapping[str, FeatureBytes] = MappingProxyType({}), *, on_gpu: bool) -> int:
    """Return the bytes that steps, rows and features take in addition to weights and pages."""
    rows = limits.extent(Axis.ROWS) * layout.recurrent.capacity(limits).row_bytes
    buffers = 0 if on_gpu else sum(room.buffers for room in feature_bytes.values())  # measured with the rows on a GPU
    return step.total + rows + buffers + sum(room.later for room in feature_bytes.values())


def pages_within(config: EngineConfig, layout: CacheLayout, limits: Limits, budget: int) -> int:
    """Return how many pages of `budget` bytes the pool gets. By default the pool is no larger than all rows at their
    longest with all their checkpoints need. A larger pool could keep more prefixes of finished requests; it is made
    only if the settings give the memory for it."""
    rows, num_pages = layout.recurrent.capacity(limits), budget // layout.page_bytes
    if config.kv_cache_memory_bytes is not None and config.enable_prefix_caching:
        return num_pages
    most = (_pages_of_request(layout, limits) + rows.max_checkpoints * rows.checkpoint_pages) * limits.max_requests + 1
    return min(most, num_pages)


def _pages_of_request(layout: CacheLayout, limits: Limits) -> int:
    """Return the most pages that a request of the greatest length holds."""
    return sum(group.kind.capacity(limits).max_pages for group in layout.groups)


def _stored_as(layout: CacheLayout) -> str:
    """Describe for the report the dtypes of keys and values. Empty if all layers use the model's dtype."""
    layers: Counter[str] = Counter()
    for group in layout.groups:
        layers[group.spec.cache_type.name] += len(group.layers)
    if set(layers) == {MODEL_CACHE.name}:
        return ""
    names = {MODEL_CACHE.name: "the model's dtype"}
    return " (" + ", ".join(f"{count} layers in {names.get(name, name)}" for name, count in layers.items()) + ")"


def fit_max_len(config: EngineConfig, layout: CacheLayout, limits: Limits, plan: MemoryPlan) -> Limits:
    """Make sure that a request of max_len tokens fits the pool, since it could otherwise wait for ever. If it does not
    fit, an automatic max_len is lowered, and a max_len that the user gave is refused."""
    usable = plan.num_pages - 1
    low = longest_request(layout, limits, plan.num_pages)
    if low == limits.max_len:
        return limits
    if low < 1:
        raise NoDeviceMemory(f"the cache has {usable} pages that can be used, too few for one token: give it more "
                             "memory (num_pages, kv_cache_memory_bytes, gpu_memory_utilization)")
    if config.max_model_len is not None and not config.fit:
        raise NoDeviceMemory(
            f"the cache holds {usable} pages, enough for one request of {low} tokens, and max_model_len is "
            f"{limits.max_len}: "
            f"lower max_model_len to {low}, or give the cache more memory (num_pages, kv_cache_memory_bytes, "
            "gpu_memory_utilization)"
        )
    log.warning("the cache holds one request of %d tokens, so max_model_len is lowered to that from the model's %d: "
                "longer answers end there (give the cache more memory: kv_cache_memory_bytes, num_pages)",
                low, limits.max_len)
    return replace(limits, max_len=low)


def longest_request(layout: CacheLayout, limits: Limits, num_pages: int) -> int:
    """Return the most tokens, up to max_len, that one request can have in a pool of `num_pages` pages. 0 if it cannot
    have one."""
    def fits(length: int) -> bool:
        return sum(group.kind.pages_to_start(length, limits) for group in layout.groups) < num_pages

    if fits(limits.max_len):
        return limits.max_len
    low, high = 0, limits.max_len
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def collect_replaced() -> None:
    """Run a garbage collection, so that replaced objects and the tensors that they hold are freed. Objects from
    start-up are unfrozen for it: collections skip frozen objects, so a frozen object in a reference cycle would hold
    its tensors for ever."""
    is_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if is_frozen:
        gc.freeze()


def release_dropped() -> None:
    """Free the memory of objects that are no longer used, and give GPU memory back to the driver. A garbage collection
    is needed, because parts of a model may refer to each other, and so do captured steps and the objects that choose
    among them."""
    collect_replaced()
    torch.cuda.empty_cache()


def _no_room(config: EngineConfig, device: torch.device, budget: int, weights: int, other: int) -> str:
    if config.kv_cache_memory_bytes is not None:
        return f"kv_cache_memory_bytes={config.kv_cache_memory_bytes} is less than one page: raise it"
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
