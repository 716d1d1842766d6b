"""Stands for `vllm.utils`: the helpers that scripts use."""

import uuid

from outrider.compat.argument_parser import FlexibleArgumentParser
from outrider.compat.network import get_distributed_init_method, get_ip, get_open_port

__all__ = ["FlexibleArgumentParser", "get_distributed_init_method", "get_ip", "get_open_port", "random_uuid"]

# What to use instead of helpers that are not here.
NOT_HERE = {
    "is_hip": "torch.version.hip says whether torch was built for ROCm",
    "STR_DTYPE_TO_TORCH_DTYPE": "getattr(torch, name) gives the type of a name",
    "cuda_device_count_stateless": "use torch.cuda.device_count()",
    "make_async": "use asyncio.to_thread",
    "merge_async_iterators": "read each stream in a task of its own",
}


def random_uuid() -> str:
    """A random id for a request."""
    return uuid.uuid4().hex


def __getattr__(name: str) -> object:
    if name in NOT_HERE:
        raise ImportError(f"{__name__}.{name} is not supported: {NOT_HERE[name]}")
    raise AttributeError(f"{__name__} has no {name!r}; it has {', '.join(__all__)}")
