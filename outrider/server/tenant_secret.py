"""The secret from which the server derives the salt of each API key. With a disk cache it is kept in the cache's
folder, so that a later server finds the pages of the same keys."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from outrider.config import EngineConfig
from outrider.core.lazy_exports import LateModule

if TYPE_CHECKING:
    from outrider.features.tiers.disk import folder
else:
    folder = LateModule("outrider.features.tiers.disk.folder")

log = logging.getLogger("outrider")


def kept_secret(engine: EngineConfig) -> bytes | None:
    """Return the secret of the engine's disk cache; None without one, or if its folder cannot be used."""
    if engine.disk_cache_dir is None:
        return None
    try:
        cache = folder.CacheFolder(engine.disk_cache_dir)
        try:
            return cache.secret()
        finally:
            cache.close()
    except (OSError, ValueError) as error:
        log.warning("pages of API keys will not be found after a restart: %s", error)
        return None
