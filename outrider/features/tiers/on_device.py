"""TiersOnDevice: the worker's part of caches beyond the device. It opens the places and gives each step a PageMover."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from outrider.config import EngineConfig
from outrider.core import Limits
from outrider.features.tiers.domain import domain_digest
from outrider.features.tiers.medium import PageMedium
from outrider.features.tiers.mover import PageMover
from outrider.models.base import Model
from outrider.runner.step import DeviceStep
from outrider.runner.worker_feature import WorkerFeature

MakeMedia = Callable[[bytes, int], Sequence[PageMedium]]  # by the digest of what pages depend on, and bytes of a page


class TiersOnDevice(WorkerFeature):
    name = "cache beyond the device"

    def __init__(self, config: EngineConfig, make_media: MakeMedia | None = None) -> None:
        """make_media: makes the places, in the order in which they are asked; by default those of the settings."""
        self._config = config
        self._make_media = make_media or partial(media_of_settings, config)

    def attach(self, step: DeviceStep, model: Model, limits: Limits) -> None:
        loaded_at, page_bytes = time.time(), step.pool.layout.page_bytes

        def open_places() -> tuple[bytes, Sequence[PageMedium]]:
            domain = domain_digest(self._config, model, step.drafter, step.pool.layout, loaded_at)
            return domain, self._make_media(domain, page_bytes)

        step.add_part(PageMover(step.pool, open_places))


def media_of_settings(config: EngineConfig, domain: bytes, page_bytes: int) -> list[PageMedium]:
    media: list[PageMedium] = []
    return media
