"""TiersInEngine: the engine's part of caches beyond the device: it tracks which pages they hold. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.cache.manager import CacheManager
from outrider.cache.media import PageMedia
from outrider.cache.with_media import CacheWithMedia, add_media
from outrider.config import EngineConfig
from outrider.engine.engine_feature import EngineFeature


class TiersInEngine(EngineFeature):
    def __init__(self, config: EngineConfig, names: Sequence[str] = ()) -> None:
        """names: the storages in lookup order; by default those of the settings."""
        if config.tensor_parallel_size > 1:
            raise ValueError("caches in host memory and on disk do not support several ranks yet: use "
                             "tensor_parallel_size=1, or leave host_cache_memory and disk_cache_dir out")
        self._media = PageMedia(names or names_of_settings(config))

    def make_cache(self, plain: CacheManager) -> CacheWithMedia:
        return add_media(plain, self._media)


def names_of_settings(config: EngineConfig) -> list[str]:
    asked = {"host": config.host_cache_memory, "disk": config.disk_cache_dir}
    return [name for name, value in asked.items() if value]
