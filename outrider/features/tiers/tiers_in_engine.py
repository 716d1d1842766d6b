"""TiersInEngine: the engine's part of caches beyond the device: it tracks which pages they hold. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.cache.manager import CacheManager
from outrider.cache.media import PageMedia
from outrider.cache.sessions import CacheSessions
from outrider.cache.with_media import CacheWithMedia, add_media
from outrider.config import EngineConfig
from outrider.engine.engine import Engine
from outrider.engine.engine_feature import EngineFeature
from outrider.features.tiers.session_reader import session_of

UNKNOWN_BYTES = 1 << 30  # in place of the size of places from outside the package


class TiersInEngine(EngineFeature):
    def __init__(self, config: EngineConfig, names: Sequence[str] = ()) -> None:
        """names: the storages in lookup order; by default those of the settings."""
        if config.tensor_parallel_size > 1:
            raise ValueError("caches in host memory and on disk do not support several ranks yet: use "
                             "tensor_parallel_size=1, or leave host_cache_memory and disk_cache_dir out")
        self._media = PageMedia(names or names_of_settings(config))
        sizes = [config.host_cache_memory, config.disk_cache_size if config.disk_cache_dir else None]
        self._sessions = CacheSessions(min((size for size in sizes if size), default=UNKNOWN_BYTES))

    def make_cache(self, plain: CacheManager) -> CacheWithMedia:
        return add_media(plain, self._media, self._sessions)


def drop_session(engine: Engine, given: str | tuple[str, str]) -> bool:
    """Delete the pages of a session. Returns False if there is none with this name. Called on the thread that calls
    `Engine.step`."""
    cache = engine.scheduler.cache
    return isinstance(cache, CacheWithMedia) and cache.drop_session(session_of(given))


def names_of_settings(config: EngineConfig) -> list[str]:
    asked = {"host": config.host_cache_memory, "disk": config.disk_cache_dir}
    return [name for name, value in asked.items() if value]
