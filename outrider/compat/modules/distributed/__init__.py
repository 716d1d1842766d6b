"""Stands for `vllm.distributed`: only the clean-up function, because the engine starts its ranks itself."""

import gc

from outrider.compat.settings import ONE_DEVICE

__all__ = ["cleanup_dist_env_and_memory"]


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Collect engines that are no longer used, which frees their memory. LLM.close does this at once."""
    gc.collect()


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)
    raise ImportError(f"{__name__}.{name} is not supported: {ONE_DEVICE}")
