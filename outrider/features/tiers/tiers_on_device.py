"""TiersOnDevice: the worker's part of caches beyond the device. It opens them, and gives each step a PageMover."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from outrider.config import EngineConfig
from outrider.core import Limits
from outrider.core.background_work import BackgroundWork
from outrider.core.lazy_exports import LateModule
from outrider.features.tiers.copies import buffer_of
from outrider.features.tiers.domain import domain_digest
from outrider.features.tiers.medium import PageMedium
from outrider.features.tiers.mover import PageMover
from outrider.features.tiers.weights_turn import WeightsTurn
from outrider.models.base import Model
from outrider.runner.step import DeviceStep
from outrider.runner.worker_feature import WorkerFeature

if TYPE_CHECKING:
    from outrider.features.tiers import disk, host_store
else:
    disk = LateModule("outrider.features.tiers.disk")
    host_store = LateModule("outrider.features.tiers.host_store")

log = logging.getLogger("outrider")
MakeMedia = Callable[[bytes, int], Sequence[PageMedium]]  # by the digest of what pages depend on, and bytes of a page


class TiersOnDevice(WorkerFeature):
    name = "cache beyond the device"

    def __init__(self, config: EngineConfig, make_media: MakeMedia | None = None) -> None:
        """make_media: makes the storages in lookup order; by default those of the settings."""
        self._config = config
        self._make_media = make_media
        self._turn = WeightsTurn()

    def background(self) -> BackgroundWork:
        return self._turn

    def attach(self, step: DeviceStep, model: Model, limits: Limits) -> None:
        loaded_at, page_bytes = time.time(), step.pool.layout.page_bytes

        def open_places() -> tuple[bytes, Sequence[PageMedium]]:
            domain = domain_digest(self._config, model, step.drafter, step.pool.layout, loaded_at, self._turn.lock)
            if self._make_media is not None:
                return domain, self._make_media(domain, page_bytes)
            on_gpu = step.pool.data.device.type == "cuda"
            return domain, media_of_settings(self._config, domain, page_bytes, pinned_memory if on_gpu else None)

        mover = PageMover(step.pool, open_places)
        step.add_part(mover)
        step.turns.reporters = (*step.turns.reporters, mover)


def media_of_settings(config: EngineConfig, domain: bytes, page_bytes: int,
                      make_memory: Callable[[int], memoryview] | None = None) -> list[PageMedium]:
    """Make the places that the settings ask for: host memory first, which is faster. One that cannot be used is left
    out. make_memory: allocates a part of the host memory; None: the system's memory is taken as it is written."""
    makers: list[Callable[[], PageMedium]] = []
    if config.host_cache_memory:
        makers.append(partial(host_store.HostStore, config.host_cache_memory, cell_bytes=page_bytes,
                              make_memory=make_memory))
    if config.disk_cache_dir is not None:
        about = {"model": config.model, "exact": config.exact}
        makers.append(partial(disk.DiskStore, config.disk_cache_dir, domain, config.disk_cache_size, about=about))
    media: list[PageMedium] = []
    for make in makers:
        try:
            media.append(make())
        except (OSError, ValueError) as error:
            log.error("a cache in host memory or on disk is not used: %s", error)
    return media


def pinned_memory(num_bytes: int) -> memoryview:
    """Allocate memory of the host that a GPU reads and writes by itself."""
    return buffer_of(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True))
