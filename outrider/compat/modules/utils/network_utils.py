"""Stands for `vllm.utils.network_utils`: addresses and ports for the processes of a script."""

from outrider.compat.network import get_distributed_init_method, get_ip, get_open_port

__all__ = ["get_distributed_init_method", "get_ip", "get_open_port"]


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)
    raise ImportError(f"{__name__}.{name} is not supported: use {', '.join(__all__)} or the "
                      "module socket")
